"""Families with partial rotary embedding and fused projections: Phi-3 and GLM-4.

Phi-3 (arXiv 2404.14219) and GLM-4 (transformers `models/glm4`) store queries, keys and values, or gate and up, as one
projection; seeded weights name each of them. GLM-4 norms what a block adds to the residual stream too, and turns
neighbouring dimensions together.
"""

from specverify.reference.family.base import Family, LayerNorms
from specverify.reference.family.settings import PartialRotary

SIZES = {"vocab_size": 27, "hidden_size": 16, "intermediate_size": 24, "heads": 2, "kv_heads": 1, "head_dim": 8}

PHI3 = Family(
    "phi3",
    rare=True,
    settings=PartialRotary,
    drawn=(
        {**SIZES, "vocab_size": 19, "windows": (0, 0), "settings": PartialRotary(rotary_dim=6)},
        {**SIZES, "vocab_size": 33, "heads": 3, "kv_heads": 3, "hidden_size": 24, "windows": (6, 6), "tied": True},
    ),
)
GLM4 = Family(
    "glm4",
    norms=LayerNorms(after_attention="post_self_attn_layernorm", after_feed_forward="post_mlp_layernorm"),
    rare=True,
    settings=PartialRotary,
    drawn=(
        {**SIZES, "vocab_size": 23, "windows": (0, 0), "qkv_bias": True, "norm_eps": 1.5625e-07,
         "settings": PartialRotary(rotary_dim=4)},
    ),
)  # fmt: skip
