"""Adapters: an engine of any kind as a backend, from a user's own function.

`specverify.adapt` shows the same names to users; the adapters that we ship use them too.
"""

from specverify.backends.adapt.batches import Request
from specverify.backends.adapt.blackbox import BlackBox, blackbox
from specverify.backends.adapt.component import CONTRACTS, ComponentBackend, component
from specverify.backends.adapt.eagle3_runner import executorch_eagle3
from specverify.backends.adapt.export import (
    exported,
    save_executorch,
    save_executorch_eagle3,
    save_gguf,
    save_onnx,
    save_openvino,
)
from specverify.backends.adapt.generated import Generated
from specverify.backends.adapt.models import checkpoint_of, save_checkpoint, transformers_model, words_tokenizer
from specverify.backends.adapt.stepper import PARTS, Stepper, stepper
from specverify.backends.adapt.tables import TableSampler, tables

__all__ = [
    "CONTRACTS",
    "PARTS",
    "BlackBox",
    "ComponentBackend",
    "Generated",
    "Request",
    "Stepper",
    "TableSampler",
    "blackbox",
    "checkpoint_of",
    "component",
    "executorch_eagle3",
    "exported",
    "save_checkpoint",
    "save_executorch",
    "save_executorch_eagle3",
    "save_gguf",
    "save_onnx",
    "save_openvino",
    "stepper",
    "tables",
    "transformers_model",
    "words_tokenizer",
]
