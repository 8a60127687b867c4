"""Granite (transformers `models/granite`): Llama with four multipliers.

They multiply embeddings, the scores of attention and what a block adds to the residual stream, and divide logits.
"""

from specverify.reference.family.base import ArchitectureFields, Family
from specverify.reference.malformed import Malformed


def _check(arch: ArchitectureFields) -> None:
    for name in arch.words.settings:
        if not arch.setting(name) > 0:
            raise Malformed("settings", f"{name} of {arch.setting(name)} is not positive")


GRANITE = Family(
    "granite",
    rare=True,
    check=_check,
    settings={
        "embedding_multiplier": 1.0,
        "attention_multiplier": 1.0,  # in the place of 1 over the square root of the head size
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
    drawn=(
        {
            "vocab_size": 25, "hidden_size": 16, "intermediate_size": 24, "heads": 2, "kv_heads": 1, "head_dim": 8,
            "windows": (0, 0), "norm_eps": 1e-6, "tied": True,
            "settings": (("attention_multiplier", 0.25), ("embedding_multiplier", 1.5), ("logits_scaling", 0.5),
                         ("residual_multiplier", 0.75)),
        },
    ),
)  # fmt: skip
