"""A stand-in for vLLM: the names and signatures that version 0.32.0 publishes, over plain transformers models.

It proves nothing of vLLM: it shows that our adapter of vLLM calls what vLLM has and reads what vLLM answers.
"""

from .engine import LLM, EngineArgs
from .sampling_params import SamplingParams

__version__ = "0.32.0"

__all__ = ["LLM", "EngineArgs", "SamplingParams"]
