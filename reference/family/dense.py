"""The families whose layers are Llama's.

Their layers have two norms with gains around 1, and `Architecture` has a field for nearly all of their settings.
"""

from dataclasses import dataclass

from specverify.reference.family.base import Family
from specverify.reference.family.settings import Settings, whole

SIZES = {"vocab_size": 27, "hidden_size": 16, "intermediate_size": 24, "heads": 2, "kv_heads": 1, "head_dim": 4}

LLAMA = Family("llama")
PANGU = Family("pangu")
QWEN2 = Family("qwen2")
QWEN3 = Family("qwen3")
MISTRAL = Family("mistral")
SEED_OSS = Family(
    "seed_oss",
    rare=True,
    drawn=({**SIZES, "vocab_size": 29, "windows": (0, 0), "qkv_bias": True, "norm_eps": 1e-6},),
)


@dataclass(frozen=True)
class Ministral3Settings(Settings):
    """Ministral 3's scale of queries.

    At position p it is 1 + scale_beta * ln(1 + floor(p / original)), original being `scale_original`, or where that is
    0 the original context of the rotary embedding.
    """

    scale_beta: float = 0.0
    scale_original: int = whole(0, least=0)


MINISTRAL3 = Family(
    "ministral3",
    rare=True,
    settings=Ministral3Settings,
    drawn=(
        {**SIZES, "vocab_size": 37, "windows": (0, 0), "settings": Ministral3Settings(scale_beta=0.5),
         "rope": {"kind": "yarn", "factor": 4.0, "original": 8}},
    ),
)  # fmt: skip
SMOLLM3 = Family(
    "smollm3",
    rare=True,
    drawn=({**SIZES, "vocab_size": 43, "windows": (0, 0, 0), "norm_eps": 1e-6, "tied": True, "unrotated": (1,)},),
)
