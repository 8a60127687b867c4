"""Cohere 2: blocks side by side, and rotary embedding where layers have a window.

After transformers' `models/cohere2`.
"""

from typing import Any

from specverify.reference.architecture import Architecture
from specverify.reference.family.cohere2 import Cohere2Settings
from specverify.reference.files.fields import Fields, quote_value
from specverify.reference.oracle.family.base import OracleFamily, biases, sliding_layers
from specverify.reference.oracle.formulas import rotary
from specverify.reference.oracle.formulas.layer import Formulas
from specverify.reference.trace import Array


def _rotate(arch: Architecture, x: Array, cos: Array, sin: Array) -> Array:
    return rotary.turn_neighbours(x, cos, sin)


def _logits(arch: Architecture, scored: Array) -> Array:
    return scored * Cohere2Settings.of(arch).logit_scale


def _slides(fields: Fields, layers: int, family: str) -> list[bool]:
    """The layers that `layer_types` names; without that field all but each `sliding_window_pattern`-th, or fourth."""
    stated_slides = sliding_layers(fields, layers)
    if stated_slides is not None:
        return stated_slides
    every = fields.integer("sliding_window_pattern", 4)
    if every < 1:
        raise fields.refuse(f"sliding_window_pattern is {every}; correct it")
    return [(layer + 1) % every != 0 for layer in range(layers)]


FIXED: dict[str, Any] = {
    "use_qk_norm": False,
    "use_parallel_block": True,
    "use_gated_activation": True,
    "rotary_pct": 1.0,
    "position_embedding_type": "rope_gptj",
    "order_of_interleaved_layers": "local_attn_first",
}
"""Fields of published files that transformers does not read, each with the value that its class computes."""


def _fields(fields: Fields) -> dict[str, Any]:
    for name, computed in FIXED.items():
        value = fields.get(name)
        if value is not None and value != computed:
            raise fields.refuse(f"{name} is {quote_value(value)}; the oracle computes {computed!r} alone")
    scale = fields.number("logit_scale", 0.0625)
    if not scale > 0:
        raise fields.refuse(f"logit_scale is {scale}, not positive; correct it")
    slides = _slides(fields, fields.integer("num_hidden_layers"), "cohere2")
    return {
        **biases(fields),
        "unrotated": tuple(layer for layer, has_window in enumerate(slides) if not has_window),
        "settings": Cohere2Settings(float(scale)),
    }


COHERE2 = OracleFamily(
    "cohere2",
    Formulas(rotate=_rotate, logits=_logits),
    model_types=("cohere2",),
    defaults={
        "max_position_embeddings": 8192,
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "sliding_window": 4096,
    },
    epsilon="layer_norm_eps",
    slides=_slides,
    fields=_fields,
    refuses={name: str(value).lower() for name, value in FIXED.items()},
)
