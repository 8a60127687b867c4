"""The Granite family."""

from transformers import GraniteConfig, GraniteForCausalLM

from specverify.backends.engine.model.family.base import ModelFamily
from specverify.backends.engine.model.float64_modules import rms_norm

GRANITE = ModelFamily(
    "granite",
    GraniteConfig,
    GraniteForCausalLM,
    lambda arch: {"mlp_bias": arch.mlp_bias, **vars(arch.settings)},
    one_bias=True,
    exact={"GraniteRMSNorm": rms_norm("variance_epsilon")},
)
