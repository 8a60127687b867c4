"""Exporters: a checkpoint directory in the forms that other engines eat.

Each exporter reads a Hugging Face directory, such as the `checkpoint` that a black box is given, and writes float32
weights. Its package is imported when it is called.
"""

from specverify.backends.adapt.export.dflash_folder import save_dflash
from specverify.backends.adapt.export.eagle1_folder import save_eagle1
from specverify.backends.adapt.export.eagle3_folder import save_eagle3
from specverify.backends.adapt.export.executorch_eagle3 import save_executorch_eagle3
from specverify.backends.adapt.export.executorch_program import save_executorch
from specverify.backends.adapt.export.gguf_file import save_gguf
from specverify.backends.adapt.export.medusa_folder import save_medusa
from specverify.backends.adapt.export.mtp_folder import save_mimo
from specverify.backends.adapt.export.onnx_folder import save_onnx
from specverify.backends.adapt.export.openvino_folder import save_openvino
from specverify.backends.adapt.models import exported

__all__ = [
    "exported",
    "save_dflash",
    "save_eagle1",
    "save_eagle3",
    "save_executorch",
    "save_executorch_eagle3",
    "save_gguf",
    "save_medusa",
    "save_mimo",
    "save_onnx",
    "save_openvino",
]
