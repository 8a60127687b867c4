"""OLMo 2, OLMo 3 and EXAONE 4, whose norms stand behind blocks alone.

After transformers' `models/olmo2`, `models/olmo3` and `models/exaone4`.
"""

from typing import Any

from specverify.reference.architecture import Architecture, Rope
from specverify.reference.files.fields import Fields
from specverify.reference.oracle.family.base import (
    STATED_HEADS,
    OracleFamily,
    biases_and_norms,
    layered_rope,
    sliding_layers,
)
from specverify.reference.oracle.formulas.layer import Formulas

OLMO2 = OracleFamily(
    "olmo2",
    model_types=("olmo2",),
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    fields=biases_and_norms,
)


def plain_where_sliding(arch: Architecture, layer: int) -> Rope:
    """The rotary embedding of a layer: without a variant where the layer has a window."""
    return Rope(theta=arch.rope.theta) if arch.windows[layer] else arch.rope


def _three_of_four(fields: Fields, layers: int, family: str) -> list[bool]:
    stated_slides = sliding_layers(fields, layers)
    return [(layer + 1) % 4 != 0 for layer in range(layers)] if stated_slides is None else stated_slides


def _olmo3_rope(fields: Fields) -> Any:
    content, local = layered_rope(fields, 500000.0, 500000.0, "rope_theta")
    if content["rope_theta"] != local:
        raise fields.refuse(f"rope_theta differs between kinds of layers ({content['rope_theta']}, {local})")
    return content


OLMO3 = OracleFamily(
    "olmo3",
    Formulas(rope=plain_where_sliding),
    model_types=("olmo3",),
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "sliding_window": 4096},
    slides=_three_of_four,
    fields=biases_and_norms,
    rope=_olmo3_rope,
    layered_rope=True,
)


def _exaone4_slides(fields: Fields, layers: int, family: str) -> list[bool]:
    """The layers that `layer_types` names; without that field all but each `sliding_window_pattern`-th."""
    stated_slides = sliding_layers(fields, layers)
    if isinstance(fields.get("sliding_window_pattern"), float):
        raise fields.refuse("sliding_window_pattern has a fraction; correct it")
    if fields.get("sliding_window") is None:
        if stated_slides is None:
            raise fields.refuse("layer_types is missing, and transformers makes none without a sliding_window; add it")
        if any(stated_slides):
            raise fields.refuse("layer_types names sliding_attention without a sliding_window; add one")
        return [False] * layers
    if stated_slides is not None:
        return stated_slides
    every = fields.integer("sliding_window_pattern", 4)
    if every < 1:
        raise fields.refuse(f"sliding_window_pattern is {every}; correct it")
    return [(layer + 1) % every != 0 for layer in range(layers)]


def _exaone4(fields: Fields) -> dict[str, Any]:
    layers = fields.integer("num_hidden_layers")
    slides = _exaone4_slides(fields, layers, "exaone4")
    hybrid = fields.get("sliding_window") is not None
    bare = tuple(layer for layer in range(layers) if hybrid and not slides[layer])
    return {"qk_norm": True, "unrotated": bare}


EXAONE4 = OracleFamily(
    "exaone4",
    model_types=("exaone4",),
    defaults={
        "max_position_embeddings": 2048,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
    },
    slides=_exaone4_slides,
    fields=_exaone4,
    nullable=STATED_HEADS - {"layer_types"} | {"sliding_window_pattern"},
)
