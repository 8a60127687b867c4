"""The families Qwen 2 and Qwen 3, which may have a window in some layers.

The `layer_types` of their config name the layers with a window.
"""

from typing import Any

from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from specverify.backends.engine.model.family.base import ModelFamily, layer_types, no_irope, refuse_unequal
from specverify.backends.engine.model.float64_modules import rms_norm
from specverify.reference.architecture import Architecture


def _qwen2(arch: Architecture) -> dict[str, Any]:
    no_irope(arch)
    window = max(arch.windows)
    return {"layer_types": layer_types(arch), "use_sliding_window": window > 0, "sliding_window": window or None}


def _qwen3(arch: Architecture) -> dict[str, Any]:
    refuse_unequal(arch, "qkv_bias and output_bias", arch.qkv_bias, arch.output_bias)
    return _qwen2(arch) | {"attention_bias": arch.qkv_bias}


QWEN2 = ModelFamily(
    "qwen2", Qwen2Config, Qwen2ForCausalLM, _qwen2, exact={"Qwen2RMSNorm": rms_norm("variance_epsilon")}
)
QWEN3 = ModelFamily(
    "qwen3", Qwen3Config, Qwen3ForCausalLM, _qwen3, exact={"Qwen3RMSNorm": rms_norm("variance_epsilon")}
)
