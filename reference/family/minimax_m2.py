"""MiniMax-M2: experts by sigmoids and a correction bias, and norms of queries and keys over all heads.

After transformers' `models/minimax_m2`. Every layer has experts, as wide as the gated blocks of other families; the
weights of those chosen are their sigmoids, scaled to the sum of 1. Rotary embedding turns the first dimensions of a
head.
"""

from dataclasses import dataclass

from specverify.reference.family.base import Family
from specverify.reference.family.experts import Mixture, mixture
from specverify.reference.family.settings import whole


@dataclass(frozen=True)
class MiniMaxM2Settings(Mixture):
    """The counts of experts, and the width of rotary embedding."""

    corrected = True
    by_sigmoid = True
    norm_topk = True
    partial_rotary = True

    experts: int = whole(256)
    experts_per_token: int = whole(8)
    rotary_dim: int = 0


SIZES = {"hidden_size": 16, "intermediate_size": 12, "norm_eps": 1e-6, "qk_norm": True}

MINIMAX_M2 = Family(
    "minimax_m2",
    whole_query_key_norms=True,
    feed_forward=mixture,
    mixes_rows=True,
    rare=True,
    settings=MiniMaxM2Settings,
    drawn=(
        {**SIZES, "vocab_size": 27, "heads": 2, "kv_heads": 1, "head_dim": 8, "windows": (0, 0),
         "settings": MiniMaxM2Settings(4, 2, 4)},
        {**SIZES, "vocab_size": 47, "heads": 4, "kv_heads": 2, "head_dim": 6, "windows": (0, 0), "tied": True,
         "settings": MiniMaxM2Settings(5, 3, 2)},
    ),
)  # fmt: skip
