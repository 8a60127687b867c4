"""The families Llama, openPangu-Embedded, Seed-OSS and SmolLM3.

openPangu-Embedded is Llama with biases on q, k, v and o, which is `attention_bias` in transformers' Llama.
"""

from typing import Any

from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from specverify.backends.engine.model.family.base import ModelFamily, equal_windows, layer_types, no_chunks
from specverify.backends.engine.model.float64_modules import rms_norm
from specverify.reference.architecture import Architecture

PANGU_DEFAULTS = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 16e6,
    "tie_word_embeddings": False,
    "bias": True,
}
"""Defaults of openPangu-Embedded for fields that its config.json leaves out (`configuration_openpangu_dense.py`)."""


def _fields(arch: Architecture) -> dict[str, Any]:
    return {"mlp_bias": arch.mlp_bias}


def _pangu(content: dict[str, Any]) -> Any:
    """The Llama config for the config.json `content` of openPangu-Embedded."""
    # These fields name openPangu's own classes and code, or are translated to `attention_bias` below.
    left_out = ("model_type", "auto_map", "architectures", "bias", "attention_bias")
    settings = {**PANGU_DEFAULTS, **content}
    config_fields = {key: value for key, value in settings.items() if key not in left_out}
    return LlamaConfig(**config_fields, attention_bias=bool(settings["bias"] or settings.get("attention_bias")))


LLAMA = ModelFamily(
    "llama", LlamaConfig, LlamaForCausalLM, _fields, one_bias=True, exact={"LlamaRMSNorm": rms_norm("variance_epsilon")}
)
PANGU = ModelFamily(
    "pangu",
    LlamaConfig,
    LlamaForCausalLM,
    _fields,
    one_bias=True,
    checkpoint={"PanguEmbedded": _pangu, "pangu_embedded": _pangu},
)


def _seed_oss(arch: Architecture) -> dict[str, Any]:
    return {"attention_bias": arch.qkv_bias, "attention_out_bias": arch.output_bias, "mlp_bias": arch.mlp_bias}


def _smollm3(arch: Architecture) -> dict[str, Any]:
    return {
        "mlp_bias": arch.mlp_bias,
        "no_rope_layers": [int(layer not in arch.unrotated) for layer in range(arch.layers)],
        "layer_types": layer_types(arch),
        "use_sliding_window": any(arch.windows),
        "sliding_window": max(arch.windows) or None,
    }


SEED_OSS = ModelFamily(
    "seed_oss", SeedOssConfig, SeedOssForCausalLM, _seed_oss, exact={"SeedOssRMSNorm": rms_norm("variance_epsilon")}
)
SMOLLM3 = ModelFamily(
    "smollm3",
    SmolLM3Config,
    SmolLM3ForCausalLM,
    _smollm3,
    windows=equal_windows,
    irope=no_chunks,
    one_bias=True,
    exact={"SmolLM3RMSNorm": rms_norm("variance_epsilon")},
)
