"""Mistral and Ministral 3 (transformers `models/mistral`, `models/ministral3`).

Llama with one window for all layers; `sliding_window` null means none. Ministral 3 scales queries by their position.
"""

from typing import Any

import numpy as np

from specverify.reference.architecture import Architecture
from specverify.reference.family.dense import Ministral3Settings
from specverify.reference.files.fields import Fields
from specverify.reference.oracle.family.base import STATED_HEADS, OracleFamily, rope_dictionary, window_for_all
from specverify.reference.oracle.formulas.layer import Formulas
from specverify.reference.trace import Array


def _mistral(fields: Fields) -> dict[str, Any]:
    if "layer_types" in fields.content and fields.get("head_dim") is None:
        raise fields.refuse("layer_types without head_dim: transformers then has a class without a default; add it")
    return {}


MISTRAL = OracleFamily(
    "mistral",
    model_types=("mistral",),
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    slides=window_for_all,
    fields=_mistral,
    nullable=STATED_HEADS | {"head_dim"},
)


def _query_factors(arch: Architecture, layer: int, positions: Array) -> Array:
    settings = Ministral3Settings.of(arch)
    factors: Array = np.ones(len(positions))
    if not settings.scale_beta:
        return factors
    original = settings.scale_original or arch.rope.original
    factors = factors + settings.scale_beta * np.log(1 + positions // original)
    return factors


def _rope(fields: Fields) -> Any:
    content = rope_dictionary(fields)
    if not isinstance(content, dict) or "llama_4_scaling_beta" not in content:
        raise fields.refuse("rope_parameters names no llama_4_scaling_beta; add them as the model's author has them")
    return content


def _ministral3(fields: Fields) -> dict[str, Any]:
    rope_fields = Fields(fields.where, _rope(fields), {})
    kind = rope_fields.get("rope_type") or rope_fields.get("type") or "default"
    if rope_fields.get("original_max_position_embeddings") is None:
        raise fields.refuse("rope_parameters has no original_max_position_embeddings, by which queries are scaled")
    original = rope_fields.integer("original_max_position_embeddings")
    if original < 1:
        raise fields.refuse(f"original_max_position_embeddings is {original}, by which queries are scaled; correct it")
    # Other kinds of rotary embedding have an original context of their own, which is the same number.
    states_original = kind in ("default", "linear", "dynamic")
    return {"settings": Ministral3Settings(rope_fields.number("llama_4_scaling_beta"), original * states_original)}


MINISTRAL3 = OracleFamily(
    "ministral3",
    Formulas(query_factors=_query_factors),
    model_types=("ministral3",),
    defaults={
        "max_position_embeddings": 262144,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
    },
    slides=window_for_all,
    fields=_ministral3,
    rope=_rope,
    rope_fields=frozenset({"llama_4_scaling_beta", "max_position_embeddings"}),
    nullable=STATED_HEADS,
)
