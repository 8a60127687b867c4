"""Exporters: a checkpoint directory in the forms that other engines eat.

Each exporter reads a Hugging Face directory, such as the `checkpoint` that a black box is given, and writes float32
weights. Its package is imported when it is called.
"""

from backends.adapt.export.gguf_file import save_gguf
from backends.adapt.export.kept import exported

__all__ = ["exported", "save_gguf"]
