"""LFM2: a short convolution between two gates, in place of attention."""

from typing import Any

import numpy as np

from specverify.reference.architecture import Architecture
from specverify.reference.family.hybrid_short_convolution import Lfm2Settings
from specverify.reference.files.fields import Fields, quote_value
from specverify.reference.oracle.family.base import STATED_HEADS, OracleFamily, Place, no_slides
from specverify.reference.oracle.formulas.layer import Formulas, State, linear
from specverify.reference.oracle.formulas.recurrence import LayerState, Recurrence, convolve
from specverify.reference.trace import Array


def _initial_state(arch: Architecture) -> LayerState:
    return np.zeros((Lfm2Settings.of(arch).conv_width - 1, arch.hidden_size)), np.zeros((0, 0, 0))


def _step(arch: Architecture, state: State, layer: int, before: LayerState, row: Array) -> tuple[LayerState, Array]:
    prefix = f"model.layers.{layer}.conv"
    entering, leaving, value = np.split(linear(row, state, f"{prefix}.in_proj"), 3)
    mixed, window = convolve(before[0], entering * value, state[f"{prefix}.conv.weight"][:, 0])
    return (window, before[1]), linear(leaving * mixed, state, f"{prefix}.out_proj")


KINDS = ("conv", "full_attention")


def _attention_layers(fields: Fields, layers: int) -> int:
    """The setting `attention_layers` of `layer_types`, or of `full_attn_idxs`."""
    types, attention_layers = fields.get("layer_types"), fields.get("full_attn_idxs")
    if types is None:
        attention_layers = list(range(layers)) if attention_layers is None else attention_layers
        if not isinstance(attention_layers, list) or any(
            not isinstance(layer, int) or not 0 <= layer < layers for layer in attention_layers
        ):
            raise fields.refuse(f"full_attn_idxs is {quote_value(attention_layers)}, no list of layers; correct it")
        types = [KINDS[layer in attention_layers] for layer in range(layers)]
    if not isinstance(types, list) or len(types) != layers or any(kind not in KINDS for kind in types):
        raise fields.refuse(f"layer_types must say {' or '.join(KINDS)} for each of {layers} layers")
    return sum(1 << layer for layer, kind in enumerate(types) if kind == KINDS[1])


def _inner_width(fields: Fields) -> int:
    """The inner width of a gated block, which transformers derives from `intermediate_size` where the file asks."""
    inner = fields.integer("block_ff_dim", fields.integer("intermediate_size"))
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return inner
    inner = int(fields.number("block_ffn_dim_multiplier", 1.0) * int(2 * inner / 3))
    multiple = fields.integer("block_multiple_of", 256)
    if multiple < 1:
        raise fields.refuse(f"block_multiple_of is {multiple}; correct it")
    return -(-inner // multiple) * multiple


def _is_tied(fields: Fields) -> bool:
    """Whether the head is the embedding, by the name of first releases or else by the usual one."""
    return fields.flag("tie_embedding", fields.flag("tie_word_embeddings", True))


def _fields(fields: Fields) -> dict[str, Any]:
    if fields.flag("conv_bias"):
        raise fields.refuse("conv_bias is true; the oracle computes convolutions without biases")
    attention_layers = _attention_layers(fields, fields.integer("num_hidden_layers"))
    return {
        "intermediate_size": _inner_width(fields),
        "norm_eps": float(fields.number("norm_eps", 1e-5)),
        "qk_norm": True,
        "tied": _is_tied(fields),
        "settings": Lfm2Settings(attention_layers, fields.integer("conv_L_cache", 3)),
    }


NAMES = (
    (".self_attn.o_proj.", ".self_attn.out_proj."),
    ("_norm.weight", "_layernorm.weight"),
    (".mlp.gate_proj.", ".feed_forward.w1."),
    (".mlp.up_proj.", ".feed_forward.w3."),
    (".mlp.down_proj.", ".feed_forward.w2."),
    ("model.norm.", "model.embedding_norm."),
)
"""Ends and parts of names, and those of transformers; the second holds for the norms of queries and keys alone."""


def stored_name(name: str) -> str:
    """The name of a tensor of `specverify.reference.weights` in a checkpoint of LFM2."""
    for our_part, their_part in NAMES:
        if our_part != "_norm.weight" or ".self_attn." in name:
            name = name.replace(our_part, their_part)
    return name


LFM2 = OracleFamily(
    "lfm2",
    Formulas(recurrence=Recurrence(_initial_state, _step)),
    model_types=("lfm2",),
    defaults={
        "max_position_embeddings": 128000,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_theta": 1000000.0,
    },
    slides=no_slides,
    fields=_fields,
    place=lambda arch, name, shape: Place(stored_name(name), shape),
    refuses={"conv_bias": "false"},
    nullable=STATED_HEADS,
)
