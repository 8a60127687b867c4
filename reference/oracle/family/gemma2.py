"""Gemma 2 (arXiv 2408.00118; transformers `models/gemma2`): its own formulas.

Norms multiply by one plus their weight. Embeddings are multiplied by the square root of the hidden size. The gate's
activation is GELU in its tanh form. Scores are divided by the square root of `query_pre_attn_scalar`. Scores and logits
go through soft caps. Everything else is Llama's.
"""

from typing import Any

import numpy as np

from specverify.reference.architecture import Architecture
from specverify.reference.family.gemma2 import Gemma2Settings
from specverify.reference.files.fields import Fields
from specverify.reference.oracle.family.base import STATED_HEADS, OracleFamily, biases, check_head_split, every_second
from specverify.reference.oracle.formulas.layer import Formulas, gelu_tanh, soft_cap


def _score_scale(arch: Architecture) -> float:
    return float(1 / np.sqrt(Gemma2Settings.of(arch).query_scalar or arch.head_dim))


FORMULAS = Formulas(
    gain=lambda weight: 1 + weight,
    activation=gelu_tanh,
    score_scale=_score_scale,
    embedding_scale=lambda arch: float(np.sqrt(arch.hidden_size)),
    logits=lambda arch, scored: soft_cap(scored, Gemma2Settings.of(arch).logit_cap),
)


def read_cap(fields: Fields, name: str) -> float:
    """The soft cap in the field `name`; 0.0, for none, where the file says null."""
    if fields.get(name) is None:
        return 0.0
    value = float(fields.number(name))
    if value <= 0:
        raise fields.refuse(f"{name} is {value}, no soft cap; correct it, or set it to null for none")
    return value


def read(fields: Fields) -> dict[str, Any]:
    """The fields of `Architecture` that are no size, from the fields of a config.json."""
    if fields.flag("use_bidirectional_attention"):
        raise fields.refuse("use_bidirectional_attention is true: such a model generates nothing token by token")
    check_head_split(fields)
    settings = Gemma2Settings(read_cap(fields, "final_logit_softcapping"), float(fields.size("query_pre_attn_scalar")))
    return {
        **biases(fields),
        "score_cap": read_cap(fields, "attn_logit_softcapping"),
        "settings": settings,
    }


GEMMA2 = OracleFamily(
    "gemma2",
    FORMULAS,
    model_types=("gemma2",),
    defaults={
        "max_position_embeddings": 8192,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
        "sliding_window": 4096,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    slides=every_second,
    fields=read,
    refuses={"use_bidirectional_attention": "false"},
    nullable=STATED_HEADS,
)
