"""A stand-in for SGLang: the names and signatures that version 0.5.23 publishes, over plain transformers models.

It proves nothing of SGLang: it shows that our adapter calls what SGLang has and reads what SGLang answers.
"""

from .engine import Engine

__version__ = "0.5.23"

__all__ = ["Engine"]
