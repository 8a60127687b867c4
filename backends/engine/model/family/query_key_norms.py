"""The families of Hunyuan's dense model and of Apertus."""

from typing import Any

from transformers import ApertusConfig, ApertusForCausalLM, HunYuanDenseV1Config, HunYuanDenseV1ForCausalLM

from specverify.backends.engine.model.family.base import ModelFamily, no_irope, no_window, refuse_unequal
from specverify.backends.engine.model.float64_modules import rms_norm
from specverify.reference.architecture import Architecture


def _fields(arch: Architecture) -> dict[str, Any]:
    no_irope(arch)
    no_window(arch)
    refuse_unequal(arch, "qkv_bias and output_bias", arch.qkv_bias, arch.output_bias)
    return {"attention_bias": arch.qkv_bias}


def _rename(name: str) -> str:
    return name.replace(".q_norm.", ".query_layernorm.").replace(".k_norm.", ".key_layernorm.")


HUNYUAN = ModelFamily(
    "hunyuan_v1_dense",
    HunYuanDenseV1Config,
    HunYuanDenseV1ForCausalLM,
    _fields,
    rename=_rename,
    exact={"HunYuanDenseV1RMSNorm": rms_norm("variance_epsilon")},
)
APERTUS = ModelFamily(
    "apertus",
    ApertusConfig,
    ApertusForCausalLM,
    lambda arch: {**_fields(arch), "hidden_act": "xielu"},
    exact={"ApertusRMSNorm": rms_norm("variance_epsilon")},
)
