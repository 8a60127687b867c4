"""Families that norm queries and keys: Hunyuan's dense model and Apertus.

Hunyuan norms them after rotary embedding, Apertus before it. Apertus (arXiv 2509.14233) has a feed-forward block
without a gate, with the activation xIELU (2411.13010) of two numbers that are learned in each layer.
"""

from specverify.reference.family.base import Family, LayerNorms, Shapes
from specverify.reference.family.settings import ArchitectureFields

SIZES = {"vocab_size": 27, "hidden_size": 16, "intermediate_size": 24, "heads": 4, "kv_heads": 2, "head_dim": 6,
         "qk_norm": True}  # fmt: skip


def _ungated(arch: ArchitectureFields, layer: int) -> Shapes:
    hidden, inner = arch.hidden_size, arch.intermediate_size
    return {
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "mlp.act_fn.alpha_p": (1,),
        "mlp.act_fn.alpha_n": (1,),
        "mlp.act_fn.beta": (),
        "mlp.act_fn.eps": (),
    }


HUNYUAN = Family("hunyuan_v1_dense", rare=True, drawn=({**SIZES, "vocab_size": 33, "windows": (0, 0)},))
APERTUS = Family(
    "apertus",
    norms=LayerNorms(before_attention="attention_layernorm", before_feed_forward="feedforward_layernorm"),
    feed_forward=_ungated,
    fixed={"act_fn.beta": 0.5, "act_fn.eps": 0.0},
    rare=True,
    drawn=(
        {**SIZES, "vocab_size": 41, "windows": (0, 0),
         "rope": {"theta": 500000.0, "kind": "llama3", "factor": 8.0, "original": 64}},
    ),
)  # fmt: skip
