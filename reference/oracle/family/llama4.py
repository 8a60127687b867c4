"""Llama 4's text model, with dense layers and with experts.

After transformers' `models/llama4`. Rotary embedding turns neighbouring dimensions together. A row goes through its
experts multiplied by the sigmoid of their scores; see `specverify.reference.family.llama4`.
"""

from typing import Any

import numpy as np

from specverify.reference.architecture import Architecture
from specverify.reference.family.llama4 import Llama4TextSettings
from specverify.reference.files.fields import Fields, quote_value
from specverify.reference.oracle.family.base import STATED_HEADS, OracleFamily, Place, biases
from specverify.reference.oracle.family.experts import router
from specverify.reference.oracle.family.llama import unrotated_layers
from specverify.reference.oracle.formulas import rotary
from specverify.reference.oracle.formulas.layer import Experts, Formulas, State, gated_block, rms_norm, sigmoid
from specverify.reference.oracle.formulas.routers import Router
from specverify.reference.trace import Array


def _rotate(arch: Architecture, x: Array, cos: Array, sin: Array) -> Array:
    """Queries or keys with neighbouring dimensions turned together, then normed without gain if the model has that."""
    turned = rotary.turn_neighbours(x, cos, sin)
    return rms_norm(turned, np.ones(arch.head_dim), arch.norm_eps) if arch.qk_norm else turned


LLAMA4 = OracleFamily("llama4", Formulas(rotate=_rotate))


def _mix(arch: Architecture, state: State, layer: int, x: Array, router: Router, experts: Array) -> Array:
    prefix = f"model.layers.{layer}.mlp"
    factors = sigmoid(np.take_along_axis(router.scores, experts, axis=-1))
    mixed = gated_block(x, state, f"{prefix}.shared_expert")
    for number in np.unique(experts):
        row, place = np.nonzero(experts == number)
        mixed[row] += gated_block(factors[row, place, None] * x[row], state, f"{prefix}.experts.{number}")
    return mixed


def _no_slides(fields: Fields, layers: int, family: str) -> list[bool]:
    if fields.get("sliding_window") is not None:
        raise fields.refuse("llama4_text has no sliding window; remove the field, or compare --against a backend")
    return [False] * layers


KINDS_OF_LAYER = ("full_attention", "chunked_attention")


def _chunk_sizes(fields: Fields, layers: int, unrotated: tuple[int, ...]) -> tuple[int, ...]:
    """The chunk of each layer, 0 for none: of those that `layer_types` names, or else of those with rotary embedding.

    Empty where no layer has a chunk.
    """
    types = fields.get("layer_types")
    if types is None:
        types = [KINDS_OF_LAYER[layer not in unrotated] for layer in range(layers)]
    if not isinstance(types, list) or len(types) != layers or any(kind not in KINDS_OF_LAYER for kind in types):
        raise fields.refuse(f"layer_types must say {' or '.join(KINDS_OF_LAYER)} for each of {layers} layers")
    is_chunked = [kind == KINDS_OF_LAYER[1] for kind in types]
    if not any(is_chunked):
        return ()
    if fields.get("attention_chunk_size") is None:
        raise fields.refuse("attention_chunk_size is null, and layers have chunked attention; give its size")
    size = fields.integer("attention_chunk_size")
    if size < 1:
        raise fields.refuse(f"attention_chunk_size is {size}; correct it")
    return tuple(size if is_chunked_layer else 0 for is_chunked_layer in is_chunked)


def _sparse_step(fields: Fields, layers: int) -> int:
    """The setting `sparse_step` that says which layers have experts: `moe_layers`, or each so many layers the last."""
    stated_layers = fields.get("moe_layers")
    if stated_layers is None:
        step = fields.integer("interleave_moe_layer_step", 1)
        if step < 1:
            raise fields.refuse(f"interleave_moe_layer_step is {step}; correct it")
        return step
    for step in range(layers + 1):
        if stated_layers == [layer for layer in range(layers) if step and (layer + 1) % step == 0]:
            return step
    raise fields.refuse(
        f"moe_layers is {quote_value(stated_layers)}; the oracle computes each so many layers alone; "
        "compare --against a backend"
    )


def _fields(fields: Fields) -> dict[str, Any]:
    layers = fields.integer("num_hidden_layers")
    unrotated = unrotated_layers(fields, layers, (None, []))
    if len(fields.get("no_rope_layers") or [()] * layers) != layers:
        raise fields.refuse(f"no_rope_layers must say 1 (rotary embedding) or 0 for each of {layers} layers")
    if fields.integer("no_rope_layer_interval", 4) < 1:  # transformers divides by it whatever the list says
        raise fields.refuse(f"no_rope_layer_interval is {fields.get('no_rope_layer_interval')}; correct it")
    has_temperature = fields.flag("attn_temperature_tuning", True) and bool(unrotated)
    settings = Llama4TextSettings(
        experts=fields.integer("num_local_experts", 16),
        experts_per_token=fields.integer("num_experts_per_tok", 1),
        expert_size=fields.integer("intermediate_size", 8192),
        sparse_step=_sparse_step(fields, layers),
    )
    floor, scale = fields.integer("floor_scale", 8192), fields.number("attn_scale", 0.1)
    if has_temperature and (floor < 1 or scale <= 0):
        raise fields.refuse(f"floor_scale is {floor} and attn_scale {scale}; correct them")
    return {
        "intermediate_size": fields.integer("intermediate_size_mlp", 16384),
        **biases(fields),
        "qk_norm": fields.flag("use_qk_norm", True),
        "unrotated": unrotated,
        "chunks": _chunk_sizes(fields, layers, unrotated),
        **({"floor_scale": floor, "attn_scale": float(scale)} if has_temperature else {}),
        "settings": settings,
    }


def _place(arch: Architecture, name: str, shape: tuple[int, ...]) -> Place:
    """Checkpoints hold all experts of a layer in one tensor, inputs first; gate and up stand side by side."""
    stored = name.replace(".mlp.gate.", ".mlp.router.").replace(".mlp.", ".feed_forward.")
    if ".feed_forward.experts." not in stored:
        return Place(stored, shape)
    prefix, number, part, _ = stored.rsplit(".", 3)
    settings, expert = Llama4TextSettings.of(arch), int(number)
    experts, inner, hidden = settings.experts, settings.expert_size, arch.hidden_size
    if part == "down_proj":
        return Place(f"{prefix}.down_proj", (experts, inner, hidden), lambda values: values[expert].T)
    columns = slice(None, inner) if part == "gate_proj" else slice(inner, None)
    return Place(f"{prefix}.gate_up_proj", (experts, hidden, 2 * inner), lambda values: values[expert, :, columns].T)


LLAMA4_TEXT = OracleFamily(
    "llama4_text",
    Formulas(rotate=_rotate, experts=Experts(router, _mix)),
    model_types=("llama4_text",),
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "attention_chunk_size": 8192,
    },
    slides=_no_slides,
    fields=_fields,
    refuses={"sliding_window": "null"},
    place=_place,
    nullable=STATED_HEADS | {"attention_chunk_size"},
)
