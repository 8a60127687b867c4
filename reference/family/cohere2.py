"""Cohere 2 (Command R7B, Command A): attention and feed-forward block side by side.

After transformers' `models/cohere2`. Both read the same normed input of the layer. Norms subtract the mean. Layers with
a window have rotary embedding of neighbouring dimensions, and the others, each fourth one, have none. Logits are
multiplied by a number.
"""

from dataclasses import dataclass

from specverify.reference.family.base import Family, LayerNorms
from specverify.reference.family.settings import Settings, positive


@dataclass(frozen=True)
class Cohere2Settings(Settings):
    """The factor of logits."""

    logit_scale: float = positive(0.0625)


SIZES = {"hidden_size": 16, "intermediate_size": 24, "heads": 2, "kv_heads": 1}

COHERE2 = Family(
    "cohere2",
    norms=LayerNorms(before_feed_forward=None),
    centred_norms=True,
    side_by_side=True,
    rare=True,
    settings=Cohere2Settings,
    drawn=(
        {**SIZES, "vocab_size": 23, "head_dim": 8, "windows": (5, 0), "unrotated": (1,), "tied": True,
         "settings": Cohere2Settings(0.75)},
        {**SIZES, "vocab_size": 41, "heads": 4, "kv_heads": 2, "head_dim": 4, "windows": (3, 3, 0), "unrotated": (2,),
         "rope": {"theta": 50000.0}, "settings": Cohere2Settings(1.5)},
    ),
)  # fmt: skip
