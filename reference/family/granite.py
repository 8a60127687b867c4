"""Granite (transformers `models/granite`): Llama with four multipliers.

They multiply embeddings, the scores of attention and what a block adds to the residual stream, and divide logits.
"""

from dataclasses import dataclass, replace

from specverify.reference.family.base import Family
from specverify.reference.family.settings import Settings, positive


@dataclass(frozen=True)
class GraniteSettings(Settings):
    """The multipliers, under transformers' names."""

    embedding_multiplier: float = positive(1.0)
    attention_multiplier: float = positive(1.0)  # in the place of 1 over the square root of the head size
    residual_multiplier: float = positive(1.0)
    logits_scaling: float = positive(1.0)

    def with_wider_heads(self, ratio: float) -> "GraniteSettings":
        """See `Settings.with_wider_heads`."""
        return replace(self, attention_multiplier=self.attention_multiplier / ratio**0.5)


GRANITE = Family(
    "granite",
    rare=True,
    settings=GraniteSettings,
    drawn=(
        {
            "vocab_size": 25, "hidden_size": 16, "intermediate_size": 24, "heads": 2, "kv_heads": 1, "head_dim": 8,
            "windows": (0, 0), "norm_eps": 1e-6, "tied": True,
            "settings": GraniteSettings(embedding_multiplier=1.5, attention_multiplier=0.25, residual_multiplier=0.75,
                                        logits_scaling=0.5),
        },
    ),
)  # fmt: skip
