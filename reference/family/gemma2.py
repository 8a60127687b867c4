"""Gemma 2 (arXiv 2408.00118; transformers `models/gemma2`).

A layer has four norms, which multiply by one plus their weight. Embeddings are multiplied by the square root of the
hidden size; the feed-forward block is GeGLU. Attention's scores and the logits go through soft caps. Every second layer
has a sliding window.
"""

from dataclasses import dataclass, replace
from typing import TypeVar

from specverify.reference.family.base import Family, LayerNorms
from specverify.reference.family.settings import Settings

G = TypeVar("G", bound="Gemma2Settings")


@dataclass(frozen=True)
class Gemma2Settings(Settings):
    """The soft cap of logits, and the scale of scores."""

    logit_cap: float = 0.0  # a logit s becomes cap * tanh(s / cap); 0 for none
    query_scalar: float = 0.0  # scores are divided by the square root of it; 0 for that of the head size

    def with_wider_heads(self: G, ratio: float) -> G:
        """See `Settings.with_wider_heads`."""
        return replace(self, query_scalar=self.query_scalar * ratio)


GEMMA2 = Family(
    "gemma2",
    norms=LayerNorms(
        before_feed_forward="pre_feedforward_layernorm",
        after_attention="post_attention_layernorm",
        after_feed_forward="post_feedforward_layernorm",
    ),
    resting_gain=0.0,
    soft_caps=True,
    settings=Gemma2Settings,
    drawn=(
        {
            "vocab_size": 25, "hidden_size": 16, "intermediate_size": 24, "heads": 2, "kv_heads": 1, "head_dim": 4,
            "windows": (4, 0), "norm_eps": 1e-6, "tied": True, "score_cap": 1.0,
            "settings": Gemma2Settings(logit_cap=4.0, query_scalar=6.0),
        },
        {
            "vocab_size": 53, "hidden_size": 16, "intermediate_size": 24, "heads": 4, "kv_heads": 2, "head_dim": 8,
            "windows": (6, 0, 6), "norm_eps": 1e-6, "settings": Gemma2Settings(logit_cap=6.0),
        },
    ),
)  # fmt: skip
