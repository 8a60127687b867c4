"""The families of Hunyuan's dense model and of Apertus."""

from transformers import ApertusConfig, ApertusForCausalLM, HunYuanDenseV1Config, HunYuanDenseV1ForCausalLM

from specverify.backends.engine.model.family.base import ModelFamily
from specverify.backends.engine.model.float64_modules import rms_norm


def _rename(name: str) -> str:
    return name.replace(".q_norm.", ".query_layernorm.").replace(".k_norm.", ".key_layernorm.")


HUNYUAN = ModelFamily(
    "hunyuan_v1_dense",
    HunYuanDenseV1Config,
    HunYuanDenseV1ForCausalLM,
    one_bias=True,
    rename=_rename,
    exact={"HunYuanDenseV1RMSNorm": rms_norm("variance_epsilon")},
)
APERTUS = ModelFamily(
    "apertus",
    ApertusConfig,
    ApertusForCausalLM,
    lambda arch: {"hidden_act": "xielu"},
    one_bias=True,
    exact={"ApertusRMSNorm": rms_norm("variance_epsilon")},
)
