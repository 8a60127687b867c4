"""ERNIE 4.5, dense and with experts, whose rotary embedding turns neighbouring dimensions together.

After transformers' `models/ernie4_5` and `models/ernie4_5_moe`. The softmax over all experts, plus a correction bias,
chooses the experts of a row; their weights are those of the softmax alone, scaled to the sum of 1. Experts without a
gate are beside them. Layers before a first and behind a last one have gated blocks.
"""

from dataclasses import dataclass

from specverify.reference.family.base import Family
from specverify.reference.family.experts import Mixture, mixture
from specverify.reference.family.settings import whole


@dataclass(frozen=True)
class Ernie45MoeSettings(Mixture):
    """The counts of experts, and the layers that have them."""

    corrected = True
    norm_topk = True

    experts: int = whole(64)
    experts_per_token: int = whole(6)
    expert_size: int = whole(1536)
    shared_experts: int = whole(2, least=0)
    dense_layers: int = whole(1, least=0)
    end_layer: int = whole(0, least=0)  # layers from this one on have gated blocks; 0 where none follow
    sparse_step: int = whole(1)
    norm_min: float = 1e-12

    def has_experts(self, layer: int) -> bool:
        """See `Mixture.has_experts`."""
        return super().has_experts(layer) and not 0 < self.end_layer <= layer


SIZES = {"hidden_size": 16, "intermediate_size": 24, "heads": 2, "kv_heads": 1}

ERNIE4_5 = Family(
    "ernie4_5",
    rare=True,
    drawn=({**SIZES, "vocab_size": 39, "head_dim": 8, "windows": (0, 0), "tied": True,
            "rope": {"theta": 500000.0}},),
)  # fmt: skip

ERNIE4_5_MOE = Family(
    "ernie4_5_moe",
    feed_forward=mixture,
    mixes_rows=True,
    rare=True,
    settings=Ernie45MoeSettings,
    drawn=(
        {**SIZES, "vocab_size": 29, "head_dim": 8, "windows": (0, 0), "tied": True,
         "settings": Ernie45MoeSettings(4, 2, 12, shared_experts=1)},
        {**SIZES, "vocab_size": 43, "heads": 4, "kv_heads": 2, "head_dim": 4, "windows": (0, 0, 0),
         "settings": Ernie45MoeSettings(5, 3, 10, shared_experts=0, dense_layers=0, end_layer=2, norm_min=0.75)},
    ),
)  # fmt: skip
