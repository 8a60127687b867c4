"""Gemma 4, text model (transformers `models/gemma4`).

A checkpoint has the `model_type` gemma4_text, or is one of several modalities, of type gemma4, whose text model is read
by itself. Blocks of experts (`enable_moe_block`) are not computed.
"""

import re
from dataclasses import replace
from typing import Any

import numpy as np

from specverify.reference.architecture import Architecture, Rope
from specverify.reference.family.gemma4 import EMBEDDING_OF_LAYERS, Gemma4Settings
from specverify.reference.files.fields import Fields, quote_value
from specverify.reference.oracle.family import gemma2
from specverify.reference.oracle.family.base import (
    KINDS_OF_LAYER,
    STATED_HEADS,
    OracleFamily,
    biases,
    rope_without_nulls,
    sliding_layers,
)
from specverify.reference.oracle.formulas.layer import State, gelu_tanh, linear, rms_norm, soft_cap
from specverify.reference.trace import Array


def _project(arch: Architecture, state: State, layer: int, name: str, x: Array) -> Array:
    """Queries, keys or values of `x` [T, hidden], normed: [T, heads, width]. Values are normed without a gain."""
    prefix, width = f"model.layers.{layer}.self_attn", arch.layer_heads(layer).head_dim
    serving = "k" if name == "v" and arch.settings.keys_serve_as_values(arch, layer) else name
    rows = linear(x, state, f"{prefix}.{serving}_proj").reshape(len(x), -1, width)
    gain = np.ones(width) if name == "v" else state[f"{prefix}.{name}_norm.weight"]
    return rms_norm(rows, gain, arch.norm_eps)


def _rope_of(arch: Architecture, layer: int) -> Rope:
    """Layers with a window have no variant, and a base of their own."""
    if not arch.windows[layer]:
        return arch.rope
    return Rope(theta=Gemma4Settings.of(arch).local_theta or arch.rope.theta)


def _layer_inputs(arch: Architecture, state: State, tokens: Array, x: Array, scale: float) -> Array | None:
    """Of each layer, the mean of the token's own embedding and of a normed projection of the input, over sqrt(2)."""
    width = Gemma4Settings.of(arch).layer_input_width
    if not width:
        return None
    shape = (len(tokens), arch.layers, width)
    of_token = (state[EMBEDDING_OF_LAYERS][tokens] * scale).reshape(shape)
    projected = linear(x, state, "model.per_layer_model_projection") / np.sqrt(arch.hidden_size)
    of_input = rms_norm(projected.reshape(shape), state["model.per_layer_projection_norm.weight"], arch.norm_eps)
    joined: Array = ((of_input + of_token) / np.sqrt(2)).swapaxes(0, 1)
    return joined


def _after_layer(arch: Architecture, state: State, layer: int, x: Array, inputs: Array | None) -> Array:
    """The residual stream with the gated input of the layer added, times the layer's number."""
    prefix = f"model.layers.{layer}"
    if inputs is not None:
        gated = gelu_tanh(linear(x, state, f"{prefix}.per_layer_input_gate"), state) * inputs
        added = linear(gated, state, f"{prefix}.per_layer_projection")
        x = x + rms_norm(added, state[f"{prefix}.post_per_layer_input_norm.weight"], arch.norm_eps)
    scaled: Array = x * state[f"{prefix}.layer_scalar"]
    return scaled


FORMULAS = replace(
    gemma2.FORMULAS,
    gain=lambda weight: weight,
    score_scale=lambda arch: 1.0,
    logits=lambda arch, scored: soft_cap(scored, Gemma4Settings.of(arch).logit_cap),
    rope=_rope_of,
    project=_project,
    layer_input_scale=lambda arch: float(np.sqrt(Gemma4Settings.of(arch).layer_input_width)),
    layer_inputs=_layer_inputs,
    after_layer=_after_layer,
)

ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
"""The rope dictionaries of a file without any."""


def _slides(fields: Fields, layers: int, family: str) -> list[bool]:
    """The layers that `layer_types` names; without it all but each sixth. The last one never has the window."""
    stated_slides = sliding_layers(fields, layers)
    slides = [(layer + 1) % 6 != 0 for layer in range(layers)] if stated_slides is None else stated_slides
    return [*slides[:-1], False]


def _rope(fields: Fields) -> dict[str, Any]:
    """The rope dictionary of the layers without a window."""
    return _ropes(fields)[0]


def _ropes(fields: Fields) -> tuple[dict[str, Any], float]:
    """The rope dictionary of the layers without a window, and the base of the others."""
    stated = fields.get("rope_parameters")
    content = ROPES if stated is None else stated
    if "rope_scaling" in fields.content:
        raise fields.refuse("rope_scaling beside rope_parameters of kinds of layers; remove it")
    if not isinstance(content, dict) or not all(isinstance(content.get(kind), dict) for kind in KINDS_OF_LAYER):
        raise fields.refuse("rope_parameters is no object of full_attention and sliding_attention; correct it")
    full, sliding = (rope_without_nulls(fields, content[kind]) for kind in KINDS_OF_LAYER)
    if sliding.get("rope_type", "default") != "default":
        raise fields.refuse("rope_parameters gives layers with a window a variant of rotary embedding")
    if not full.get("truncate", True):
        raise fields.refuse("truncate is false, which transformers reads for no kind of layer: the numbers differ")
    share = Fields(fields.where, full, {}).number("partial_rotary_factor", 1.0)
    if full.get("rope_type", "default") not in ("default", "proportional") and share != 1.0:
        raise fields.refuse(f"partial_rotary_factor is {share}, which proportional rotary embedding alone has here")
    base, _ = (float(Fields(fields.where, rope, {}).number("rope_theta")) for rope in (sliding, full))
    if not base > 0:
        raise fields.refuse(f"the base of rotary embedding in layers with a window is {base}; correct it")
    return full, base


def _fields(fields: Fields) -> dict[str, Any]:
    """The fields of `Architecture` that are no size, from the fields of a config.json."""
    if fields.get("use_bidirectional_attention") not in (None, "vision"):
        value = quote_value(fields.get("use_bidirectional_attention"))
        raise fields.refuse(f"use_bidirectional_attention is {value}: such a model generates nothing token by token")
    if fields.flag("enable_moe_block"):
        raise fields.refuse("enable_moe_block is true: its experts are not computed; compare --against a backend")
    if fields.content.get("attention_chunk_size") is not None:
        raise fields.refuse("attention_chunk_size beside sliding_window, of which transformers takes one; remove it")
    width, rows = fields.integer("hidden_size_per_layer_input"), fields.integer("vocab_size_per_layer_input")
    if width and rows != fields.size("vocab_size"):
        raise fields.refuse("vocab_size_per_layer_input is not vocab_size: some tokens would have no row; correct it")
    if fields.integer("num_kv_shared_layers") and not width:
        # It drops rows of inputs of layers before the first layer that shares, whether there are any or not.
        raise fields.refuse(
            "num_kv_shared_layers without hidden_size_per_layer_input, which transformers 5.23 fails on"
        )
    keys_as_values, shared = fields.flag("attention_k_eq_v"), fields.integer("num_kv_shared_layers")
    content, local = _ropes(fields)
    full_width, full_heads = _full_sizes(fields, keys_as_values)
    settings = Gemma4Settings(
        logit_cap=gemma2.read_cap(fields, "final_logit_softcapping"),
        local_theta=0.0 if local == content["rope_theta"] else local,
        full_head_dim=full_width,
        full_kv_heads=full_heads,
        keys_as_values=keys_as_values,
        shared_layers=shared,
        wide_blocks=fields.flag("use_double_wide_mlp") and shared > 0,
        layer_input_width=width,
    )
    return {**biases(fields), "qk_norm": True, "settings": settings}


def _full_sizes(fields: Fields, keys_as_values: bool) -> tuple[int, int]:
    """The width of heads in layers without a window, and their number of heads of keys and values; 0 for the others'.

    A file as transformers 5 writes it has the sizes of each layer in `per_layer_config`, and older ones two fields.
    """
    width, heads = fields.integer("global_head_dim"), fields.get("num_global_key_value_heads")
    if "per_layer_config" not in fields.content:
        # transformers reads the number for models alone whose keys serve as values.
        own_heads = fields.integer("num_global_key_value_heads") if keys_as_values and heads is not None else None
        if width < 1 or (own_heads is not None and own_heads < 1):
            raise fields.refuse(f"global_head_dim is {width}, num_global_key_value_heads {heads}; correct them")
        return width, own_heads or 0
    by_layer = fields.get("per_layer_config")
    slides = _slides(fields, fields.integer("num_hidden_layers"), "gemma4")
    full_layers = {layer for layer, slide in enumerate(slides) if not slide}
    entries = list(by_layer.values()) if isinstance(by_layer, dict) else [None]
    if not all(isinstance(entry, dict) and set(entry) <= {"head_dim", "num_key_value_heads"} for entry in entries):
        raise fields.refuse("per_layer_config is no object of layers with head_dim and num_key_value_heads; correct it")
    named_layers = {int(name) for name in by_layer if name.isdecimal()}
    if len(named_layers) < len(by_layer) or (entries and named_layers != full_layers):
        raise fields.refuse(
            "per_layer_config names other layers than those without a window; compare --against a backend"
        )
    if any(entry != entries[0] for entry in entries):
        raise fields.refuse("per_layer_config gives layers of a kind several sizes; compare --against a backend")
    stated = entries[0] if entries else None
    sizes = Fields(fields.where, stated or {}, {})
    own_width = sizes.integer("head_dim", fields.integer("head_dim"))
    own_heads = sizes.integer("num_key_value_heads", fields.integer("num_key_value_heads"))
    if min(own_width, own_heads) < 1:
        raise fields.refuse(f"per_layer_config asks for {own_heads} heads of width {own_width}; correct it")
    return own_width, own_heads


SHARED_KV = re.compile(r"model\.layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.")


def _is_idle(arch: Architecture, name: str) -> bool:
    """Whether a tensor is of keys or values of a layer that reads an earlier layer's; published files hold some."""
    match = SHARED_KV.match(name)
    return match is not None and int(match[1]) < arch.layers and arch.kv_sources[int(match[1])] != int(match[1])


GEMMA4 = OracleFamily(
    "gemma4",
    FORMULAS,
    model_types=("gemma4_text",),
    defaults={
        "max_position_embeddings": 131072,
        "vocab_size": 262144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "vocab_size_per_layer_input": 262144,
        "hidden_size_per_layer_input": 256,
        "num_kv_shared_layers": 0,
        "tie_word_embeddings": True,
        "sliding_window": 512,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    slides=_slides,
    fields=_fields,
    rope=_rope,
    layered_rope=True,
    partial_rotary=True,
    proportional=True,
    idle=_is_idle,
    refuses={
        "use_bidirectional_attention": "null or vision",
        "enable_moe_block": "false",
    },
    nullable=(STATED_HEADS - {"sliding_window"}) | {"num_global_key_value_heads"},
    nulls={"per_layer_config": {}},
    sized_layers=True,
)
