"""OLMo 2, OLMo 3 and EXAONE 4, whose norms stand behind blocks alone.

Sources: arXiv 2501.00656 for OLMo 2, 2507.11407 for EXAONE 4, transformers' `models/olmo3`. The norms of queries and
keys run over all heads of a row together in OLMo. In OLMo 3 layers with a window have plain rotary embedding, whatever
the variant of the others. In EXAONE 4 layers without a window have none where others have one.
"""

from specverify.reference.family.base import Family, LayerNorms

NORMS_AFTER = LayerNorms(
    before_attention=None,
    before_feed_forward=None,
    after_attention="post_attention_layernorm",
    after_feed_forward="post_feedforward_layernorm",
)

SIZES = {"vocab_size": 27, "hidden_size": 16, "intermediate_size": 24, "heads": 4, "kv_heads": 2, "head_dim": 4,
         "qk_norm": True}  # fmt: skip

OLMO2 = Family(
    "olmo2",
    norms=NORMS_AFTER,
    whole_query_key_norms=True,
    rare=True,
    drawn=({**SIZES, "vocab_size": 31, "windows": (0, 0)},),
)
OLMO3 = Family(
    "olmo3",
    norms=NORMS_AFTER,
    whole_query_key_norms=True,
    rare=True,
    drawn=(
        {**SIZES, "vocab_size": 35, "windows": (5, 0), "rope": {"kind": "yarn", "factor": 4.0, "original": 64}},
    ),
)  # fmt: skip
EXAONE4 = Family(
    "exaone4",
    norms=NORMS_AFTER,
    rare=True,
    drawn=(
        {**SIZES, "vocab_size": 39, "windows": (4, 0), "unrotated": (1,)},
        {**SIZES, "vocab_size": 21, "windows": (0, 0), "tied": True},
    ),
)
