"""LFM2: a gated short convolution in most layers, attention in the others."""

from typing import Any

from transformers import Lfm2Config, Lfm2ForCausalLM

from specverify.backends.base import Unsupported
from specverify.backends.engine.model.family.base import ModelFamily, no_irope, no_window
from specverify.backends.engine.model.float64_modules import rms_norm
from specverify.backends.engine.model.recurrent.short_convolution import over_trees
from specverify.reference.architecture import Architecture

NAMES = {
    "self_attn.o_proj": "self_attn.out_proj",
    "self_attn.q_norm": "self_attn.q_layernorm",
    "self_attn.k_norm": "self_attn.k_layernorm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "model.norm": "model.embedding_norm",
}
"""Parts of names in `specverify.reference.weights`, and those of transformers."""


def _rename(name: str) -> str:
    for name_here, name_there in NAMES.items():
        name = name.replace(f"{name_here}.", f"{name_there}.")
    return name


def _fields(arch: Architecture) -> dict[str, Any]:
    """The fields of the config that other families lack."""
    no_irope(arch)
    no_window(arch)
    if not arch.qk_norm:
        raise Unsupported("lfm2 without norms of queries and keys: transformers' model always has them")
    return {
        "norm_eps": arch.norm_eps,
        "layer_types": ["conv" if layer in arch.recurrent else "full_attention" for layer in range(arch.layers)],
        "conv_L_cache": int(arch.setting("conv_width")),
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,
    }


LFM2 = ModelFamily(
    "lfm2",
    Lfm2Config,
    Lfm2ForCausalLM,
    _fields,
    rename=_rename,
    prepare=over_trees,
    exact={"Lfm2RMSNorm": rms_norm("variance_epsilon")},
)
