"""Qwen3.5: the formulas of Qwen3-Next behind other projections.

After transformers' `models/qwen3_5` and `models/qwen3_5_moe`.
`mrope_section` shares rotary pairs out among the axes of positions. Text has one number on all axes, so that the field
changes no number here.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from specverify.reference.architecture import Architecture
from specverify.reference.family.hybrid_delta_rule import DeltaRuleSettings
from specverify.reference.family.qwen3_5 import Qwen35MoeSettings, Qwen35Settings
from specverify.reference.files.fields import Fields, quote_value
from specverify.reference.oracle.family.base import (
    STATED_HEADS,
    WHOLE_ROTARY,
    OracleFamily,
    biases,
    no_slides,
    rope_dictionary,
)
from specverify.reference.oracle.family.experts import num_experts, place_in_stack
from specverify.reference.oracle.family.hybrid_delta_rule import (
    FORMULAS,
    Parts,
    delta_net_place,
    delta_rule_fields,
    initial_state,
    step,
)
from specverify.reference.oracle.formulas.layer import State, linear
from specverify.reference.oracle.formulas.recurrence import LayerState, Recurrence
from specverify.reference.trace import Array

AXES = ("mrope_section", "mrope_interleaved")
"""Fields of the rope dictionary by which rotary pairs are shared out among axes."""


def _step(arch: Architecture, state: State, layer: int, before: LayerState, row: Array) -> tuple[LayerState, Array]:
    prefix, settings = f"model.layers.{layer}.linear_attn", DeltaRuleSettings.of(arch)
    width = settings.key_heads * settings.key_width
    query, key, value = np.split(linear(row, state, f"{prefix}.in_proj_qkv"), [width, 2 * width])
    gate, rate, rise = (linear(row, state, f"{prefix}.in_proj_{letter}") for letter in "zba")
    return step(arch, state, layer, before, Parts(query, key, value, gate, rate, rise))


def _rope(fields: Fields) -> Any:
    """The rope dictionary without the fields on axes."""
    content = rope_dictionary(fields)
    if not isinstance(content, dict):
        return content
    section = content.get("mrope_section", [11, 11, 10])
    if not isinstance(section, list) or len(section) != 3 or not all(type(pairs) is int for pairs in section):
        raise fields.refuse(f"mrope_section is {quote_value(section)}, not three numbers of rotary pairs; correct it")
    return {name: value for name, value in content.items() if name not in AXES}


def _check_gates(fields: Fields) -> None:
    """Refuse a file that asks for other gates, which transformers 5.23 would compute as these all the same."""
    if not fields.flag("attn_output_gate", True):
        raise fields.refuse("attn_output_gate is false; the oracle computes attention with a gate alone")
    gate = fields.get("output_gate_type")
    if gate not in (None, "swish", "silu"):
        raise fields.refuse(f"output_gate_type is {quote_value(gate)}; the oracle computes swish alone")


def _fields(fields: Fields) -> dict[str, Any]:
    _check_gates(fields)
    return {**biases(fields), "qk_norm": True, "settings": Qwen35Settings(**delta_rule_fields(fields))}


def _moe_fields(fields: Fields) -> dict[str, Any]:
    _check_gates(fields)
    settings = Qwen35MoeSettings(
        **delta_rule_fields(fields),
        experts=num_experts(fields, "num_experts", "num_local_experts", 256),
        experts_per_token=fields.integer("num_experts_per_tok", 8),
        expert_size=fields.integer("moe_intermediate_size", 512),
        shared_size=fields.integer("shared_expert_intermediate_size", 512),
    )
    # No layer has a gated block, whose width the file need not state.
    return {**biases(fields), "qk_norm": True, "intermediate_size": settings.expert_size, "settings": settings}


GATES = {"attn_output_gate": "true", "output_gate_type": "swish"}
"""Fields of gates, each with the value that is computed."""

DEFAULTS = {
    "max_position_embeddings": 32768,
    "num_attention_heads": 16,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
}

QWEN3_5 = OracleFamily(
    "qwen3_5",
    replace(FORMULAS, recurrence=Recurrence(initial_state, _step), experts=None),
    model_types=("qwen3_5_text",),
    defaults={**DEFAULTS, "num_key_value_heads": 4},
    slides=no_slides,
    fields=_fields,
    place=delta_net_place,
    partial_rotary=True,
    rope=_rope,
    module_prefixes=("mtp.",),
    refuses=GATES,
    nullable=STATED_HEADS | {"output_gate_type"},
    nulls=WHOLE_ROTARY,
)

QWEN3_5_MOE = OracleFamily(
    "qwen3_5_moe",
    replace(FORMULAS, recurrence=Recurrence(initial_state, _step)),
    model_types=("qwen3_5_moe_text",),
    defaults={**DEFAULTS, "num_key_value_heads": 2, "intermediate_size": 512},  # the last is of no layer
    slides=no_slides,
    fields=_moe_fields,
    place=delta_net_place,
    stacked=place_in_stack,
    partial_rotary=True,
    rope=_rope,
    module_prefixes=("mtp.",),
    refuses=GATES,
    nullable=STATED_HEADS | {"output_gate_type"},
    nulls=WHOLE_ROTARY,
)
