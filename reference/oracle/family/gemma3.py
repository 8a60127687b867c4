"""Gemma 3, text model (transformers `models/gemma3`).

Its formulas are Gemma 2's, with rotary embedding by kind of layer. A checkpoint of the text model has the `model_type`
gemma3_text; one with a vision tower is not read.
"""

from dataclasses import replace
from typing import Any

from specverify.reference.architecture import Architecture, Rope
from specverify.reference.family.gemma3 import Gemma3Settings
from specverify.reference.files.fields import Fields
from specverify.reference.oracle.family import gemma2
from specverify.reference.oracle.family.base import STATED_HEADS, OracleFamily, layered_rope, sliding_layers


def _rope_of(arch: Architecture, layer: int) -> Rope:
    """Layers with a window have no variant, and a base of their own."""
    if not arch.windows[layer]:
        return arch.rope
    return Rope(theta=Gemma3Settings.of(arch).local_theta or arch.rope.theta)


def _slides(fields: Fields, layers: int, family: str) -> list[bool]:
    """The layers that `layer_types` names; without it all but each `sliding_window_pattern`-th, or sixth."""
    stated_slides = sliding_layers(fields, layers)
    every = fields.integer("sliding_window_pattern", fields.integer("_sliding_window_pattern", 6))
    if every < 1:
        raise fields.refuse(f"sliding_window_pattern is {every}; correct it")
    return [(layer + 1) % every != 0 for layer in range(layers)] if stated_slides is None else stated_slides


def _layered(fields: Fields) -> tuple[dict[str, Any], float]:
    return layered_rope(fields, 1000000.0, 10000.0, "rope_local_base_freq")


def _fields(fields: Fields) -> dict[str, Any]:
    if fields.get("attn_logit_softcapping") is not None:
        raise fields.refuse("attn_logit_softcapping is not null, and transformers' Gemma 3 computes no such cap")
    architecture_fields = gemma2.read(fields)
    content, local = _layered(fields)
    local_theta = 0.0 if local == content["rope_theta"] else local
    settings = Gemma3Settings(**vars(architecture_fields["settings"]), local_theta=local_theta)
    return {**architecture_fields, "qk_norm": True, "settings": settings}


GEMMA3 = OracleFamily(
    "gemma3",
    replace(gemma2.FORMULAS, rope=_rope_of),
    model_types=("gemma3_text",),
    defaults={
        "max_position_embeddings": 131072,
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    slides=_slides,
    fields=_fields,
    rope=lambda fields: _layered(fields)[0],
    layered_rope=True,
    refuses={"use_bidirectional_attention": "false", "attn_logit_softcapping": "null"},
    nullable=STATED_HEADS,
)
