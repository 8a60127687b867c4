"""ERNIE 4.5: neighbouring dimensions turn together, and experts are chosen with a correction bias.

After transformers' `models/ernie4_5` and `models/ernie4_5_moe`.
"""

from typing import Any

from specverify.reference.architecture import Architecture
from specverify.reference.family.ernie4_5 import Ernie45MoeSettings
from specverify.reference.files.fields import Fields, quote_value
from specverify.reference.oracle.family.base import STATED_HEADS, OracleFamily, Place, no_slides
from specverify.reference.oracle.family.experts import EXPERTS, num_experts
from specverify.reference.oracle.formulas import rotary
from specverify.reference.oracle.formulas.layer import Formulas
from specverify.reference.trace import Array


def _rotate(arch: Architecture, x: Array, cos: Array, sin: Array) -> Array:
    return rotary.turn_neighbours(x, cos, sin)


def _dense_fields(fields: Fields) -> dict[str, Any]:
    biased = fields.flag("use_bias")
    return {"qkv_bias": biased, "output_bias": biased, "mlp_bias": biased}


DEFAULTS = {
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}

ERNIE4_5 = OracleFamily(
    "ernie4_5",
    Formulas(rotate=_rotate),
    model_types=("ernie4_5",),
    defaults={**DEFAULTS, "num_key_value_heads": 2, "head_dim": 128},
    slides=no_slides,
    fields=_dense_fields,
    nullable=STATED_HEADS,
)


def _end_layer(fields: Fields, layers: int) -> int:
    """The setting `end_layer`, of a field that names the last layer with experts; -1 stands for the last of all."""
    last = fields.integer("moe_layer_end_index", -1)
    if last < -1:
        raise fields.refuse(f"moe_layer_end_index is {last}; correct it")
    return 0 if last == -1 or last >= layers - 1 else last + 1


def _moe_fields(fields: Fields) -> dict[str, Any]:
    if fields.flag("use_bias"):
        raise fields.refuse("use_bias is true: the oracle computes no bias beside experts, nor one of the head")
    gate = fields.get("moe_gate")
    if gate not in (None, "topk"):
        raise fields.refuse(f"moe_gate is {quote_value(gate)}; the oracle computes topk alone")
    layers, interval = fields.integer("num_hidden_layers"), fields.integer("moe_layer_interval", 1)
    start = fields.integer("moe_layer_start_index", 1)
    end = _end_layer(fields, layers)
    if interval < 1 or start < 0:
        raise fields.refuse("moe_layer_interval or moe_layer_start_index names no layer; correct it")
    settings = Ernie45MoeSettings(
        experts=num_experts(fields, "moe_num_experts", "num_experts", 64),
        experts_per_token=num_experts(fields, "moe_k", "num_experts_per_tok", 6),
        expert_size=fields.integer("moe_intermediate_size", 1536),
        shared_experts=fields.integer("moe_num_shared_experts", 2),
        dense_layers=start,
        end_layer=end,
        sparse_step=interval,
        norm_min=float(fields.number("moe_norm_min", 1e-12)),
    )
    return {"settings": settings}


def _moe_place(arch: Architecture, name: str, shape: tuple[int, ...]) -> Place:
    if not name.endswith(".e_score_correction_bias"):
        return Place(name, shape)
    return Place(name.replace(".gate.", ".moe_statics."), (1, *shape), lambda values: values[0])


ERNIE4_5_MOE = OracleFamily(
    "ernie4_5_moe",
    Formulas(rotate=_rotate, experts=EXPERTS),
    model_types=("ernie4_5_moe",),
    defaults={**DEFAULTS, "num_key_value_heads": 4},
    slides=no_slides,
    fields=_moe_fields,
    place=_moe_place,
    refuses={"use_bias": "false", "moe_gate": "topk"},
    module_prefixes=("model.mtp_",),
    nullable=STATED_HEADS | {"moe_gate"},
    wide=(".mlp.gate.weight", "e_score_correction_bias"),
)
