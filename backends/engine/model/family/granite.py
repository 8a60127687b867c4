"""The Granite family."""

from typing import Any

from transformers import GraniteConfig, GraniteForCausalLM

from specverify.backends.engine.model.family.base import ModelFamily, no_irope, no_window, refuse_unequal
from specverify.backends.engine.model.float64_modules import rms_norm
from specverify.reference.architecture import Architecture


def _fields(arch: Architecture) -> dict[str, Any]:
    no_irope(arch)
    no_window(arch)
    refuse_unequal(arch, "qkv_bias and output_bias", arch.qkv_bias, arch.output_bias)
    return {"attention_bias": arch.qkv_bias, "mlp_bias": arch.mlp_bias, **vars(arch.settings)}


GRANITE = ModelFamily(
    "granite", GraniteConfig, GraniteForCausalLM, _fields, exact={"GraniteRMSNorm": rms_norm("variance_epsilon")}
)
