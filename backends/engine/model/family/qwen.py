"""The families Qwen 2 and Qwen 3, which may have a window in some layers.

The `layer_types` of their config name the layers with a window.
"""

from typing import Any

from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from specverify.backends.engine.model.family.base import ModelFamily, accept_all, layer_types
from specverify.backends.engine.model.float64_modules import rms_norm
from specverify.reference.architecture import Architecture


def _fields(arch: Architecture) -> dict[str, Any]:
    window = max(arch.windows)
    return {"layer_types": layer_types(arch), "use_sliding_window": window > 0, "sliding_window": window or None}


QWEN2 = ModelFamily(
    "qwen2",
    Qwen2Config,
    Qwen2ForCausalLM,
    _fields,
    windows=accept_all,
    exact={"Qwen2RMSNorm": rms_norm("variance_epsilon")},
)
QWEN3 = ModelFamily(
    "qwen3",
    Qwen3Config,
    Qwen3ForCausalLM,
    _fields,
    windows=accept_all,
    one_bias=True,
    exact={"Qwen3RMSNorm": rms_norm("variance_epsilon")},
)
