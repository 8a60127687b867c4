"""gpt-oss (transformers `models/gpt_oss`): sinks, and clamped experts with biases.

The weights of the chosen experts are the softmax over their scores alone.
"""

from typing import Any

import numpy as np

from specverify.reference.architecture import Architecture
from specverify.reference.family.gpt_oss import GptOssSettings
from specverify.reference.files.fields import Fields
from specverify.reference.oracle.family.base import (
    STATED_HEADS,
    OracleFamily,
    Place,
    biases,
    every_second,
    rope_dictionary,
)
from specverify.reference.oracle.family.experts import mix_experts, num_experts
from specverify.reference.oracle.formulas.layer import Experts, Formulas, State, linear, sigmoid
from specverify.reference.oracle.formulas.routers import Router
from specverify.reference.trace import Array


def _clamped_expert(arch: Architecture, state: State, prefix: str, x: Array) -> Array:
    """An expert: (up + 1) * gate * sigmoid(alpha * gate), both clamped, through the last projection."""
    settings = GptOssSettings.of(arch)
    limit = settings.gate_limit
    gate = np.minimum(linear(x, state, f"{prefix}.gate_proj"), limit)
    up = np.clip(linear(x, state, f"{prefix}.up_proj"), -limit, limit)
    return linear((up + 1) * gate * sigmoid(settings.gate_alpha * gate), state, f"{prefix}.down_proj")


def _router(arch: Architecture, state: State, layer: int, x: Array) -> Router:
    scores = linear(x, state, f"model.layers.{layer}.mlp.gate")
    return Router(scores, scores, GptOssSettings.of(arch).experts_per_token)


def _mix(arch: Architecture, state: State, layer: int, x: Array, router: Router, experts: Array) -> Array:
    prefix = f"model.layers.{layer}.mlp.experts"
    chosen_scores = np.take_along_axis(router.scores, experts, axis=-1)
    weights = np.exp(chosen_scores - chosen_scores.max(axis=-1, keepdims=True))
    weights = weights / weights.sum(axis=-1, keepdims=True)
    return mix_experts(
        experts, weights, x, lambda number, rows: _clamped_expert(arch, state, f"{prefix}.{number}", rows)
    )


def _rope(fields: Fields) -> Any:
    content = rope_dictionary(fields)
    if not content:
        raise fields.refuse("rope_parameters is missing; add it as the model's author published it")
    return content


def _fields(fields: Fields) -> dict[str, Any]:
    settings = GptOssSettings(
        experts=num_experts(fields, "num_local_experts", "num_experts", 128),
        experts_per_token=fields.integer("num_experts_per_tok", 4),
        gate_alpha=fields.number("swiglu_alpha", 1.702),
        gate_limit=fields.number("swiglu_limit", 7.0),
    )
    return {**biases(fields, True), "settings": settings}


def _place(arch: Architecture, name: str, shape: tuple[int, ...]) -> Place:
    """Checkpoints hold all experts of a layer in one tensor, inputs first; gate and up take turns."""
    if ".mlp.experts." not in name:
        return Place(name.replace(".mlp.gate.", ".mlp.router."), shape)
    prefix, number, part, kind = name.rsplit(".", 3)
    expert, is_down = int(number), part == "down_proj"
    experts, inner, hidden = GptOssSettings.of(arch).experts, arch.intermediate_size, arch.hidden_size
    width = hidden if is_down else 2 * inner
    columns = slice(None) if is_down else slice(0 if part == "gate_proj" else 1, None, 2)
    stored = f"{prefix}.{'down_proj' if is_down else 'gate_up_proj'}"
    if kind == "bias":
        return Place(f"{stored}_bias", (experts, width), lambda values: values[expert, columns])
    inputs = inner if is_down else hidden
    return Place(stored, (experts, inputs, width), lambda values: values[expert, :, columns].T)


GPT_OSS = OracleFamily(
    "gpt_oss",
    Formulas(experts=Experts(_router, _mix)),
    model_types=("gpt_oss",),
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "sliding_window": 128,
    },
    slides=every_second,
    fields=_fields,
    place=_place,
    rope=_rope,
    nullable=STATED_HEADS,
    wide_in_float16=("norm.weight",),
)
