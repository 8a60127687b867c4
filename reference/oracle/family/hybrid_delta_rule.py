"""Qwen3-Next: the gated delta rule, and attention whose output has a gate.

After transformers' `models/qwen3_next` and arXiv 2412.06464, section 3.1. Norms multiply by one plus their weight; the
norm behind the delta rule multiplies by its weight, and then by silu of a gate.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from specverify.reference.architecture import Architecture
from specverify.reference.family.hybrid_delta_rule import DeltaRuleSettings, Qwen3NextSettings
from specverify.reference.files.fields import Fields, quote_value
from specverify.reference.oracle.family.base import (
    STATED_HEADS,
    WHOLE_ROTARY,
    OracleFamily,
    Place,
    biases,
    no_slides,
    partial_rotary,
)
from specverify.reference.oracle.family.experts import EXPERTS, num_experts
from specverify.reference.oracle.formulas.layer import Formulas, State, linear, rms_norm, sigmoid, silu
from specverify.reference.oracle.formulas.recurrence import LayerState, Recurrence, convolve
from specverify.reference.trace import Array

LEAST = 1e-6
"""Added to the sum of squares by which queries and keys of the delta rule are normed, as transformers does."""


def initial_state(arch: Architecture) -> LayerState:
    """See `Recurrence.begin`."""
    settings = DeltaRuleSettings.of(arch)
    memory = np.zeros((settings.value_heads, settings.key_width, settings.value_width))
    return np.zeros((settings.conv_width - 1, settings.channels)), memory


def delta_rule(memory: Array, query: Array, key: Array, value: Array, decay: Array, rate: Array) -> tuple[Array, Array]:
    """One step of the gated delta rule: the memory after it, and what the query reads from it [heads, value width].

    Args:
        memory: [heads, key width, value width].
        query: [heads, key width], normed and scaled, as `key`.
        key: See query.
        value: [heads, value width].
        decay: The logarithm of the share of the memory that stays, [heads].
        rate: The share of the error that is corrected, [heads].
    """
    memory_after = memory * np.exp(decay)[:, None, None]
    error = value - np.einsum("hkv,hk->hv", memory_after, key)
    memory_after = memory_after + key[:, :, None] * (rate[:, None] * error)[:, None, :]
    return memory_after, np.einsum("hkv,hk->hv", memory_after, query)


def _normalise(x: Array) -> Array:
    length: Array = np.sqrt((x * x).sum(axis=-1, keepdims=True) + LEAST)
    return x / length


@dataclass(frozen=True)
class Parts:
    """What a row enters the gated delta rule with.

    Attributes:
        query: The queries before the convolution, one for each key head; any shape of `key_heads * key_width` numbers.
        key: The keys, as `query`.
        value: The values before the convolution, of `value_heads * value_width` numbers.
        gate: The gate of what is read, of as many numbers.
        rate: The rate before the sigmoid, of `value_heads` numbers.
        rise: What raises the decay before the softplus, of as many.
    """

    query: Array
    key: Array
    value: Array
    gate: Array
    rate: Array
    rise: Array


def step(arch: Architecture, state: State, layer: int, before: LayerState, parts: Parts) -> tuple[LayerState, Array]:
    """The state of `layer` after a row with these parts, and the layer's output [hidden]; see `Recurrence.step`."""
    prefix, settings = f"model.layers.{layer}.linear_attn", DeltaRuleSettings.of(arch)
    keys, values = settings.key_heads, settings.value_heads
    key_width, value_width = settings.key_width, settings.value_width
    group = values // keys
    entering = np.concatenate([parts.query.ravel(), parts.key.ravel(), parts.value.ravel()])
    mixed, window = convolve(before[0], entering, state[f"{prefix}.conv1d.weight"][:, 0])
    query, key, value = np.split(silu(mixed), np.cumsum([keys * key_width, keys * key_width]))
    query, key = (np.repeat(_normalise(rows.reshape(keys, key_width)), group, axis=0) for rows in (query, key))
    decay = -np.exp(state[f"{prefix}.A_log"]) * np.logaddexp(0.0, parts.rise.ravel() + state[f"{prefix}.dt_bias"])
    scaled_query = query / np.sqrt(key_width)
    memory, read = delta_rule(
        before[1], scaled_query, key, value.reshape(values, value_width), decay, sigmoid(parts.rate.ravel())
    )
    out = rms_norm(read, state[f"{prefix}.gain"], arch.norm_eps) * silu(parts.gate.reshape(values, value_width))
    return (window, memory), linear(out.ravel(), state, f"{prefix}.out_proj")


def _step(arch: Architecture, state: State, layer: int, before: LayerState, row: Array) -> tuple[LayerState, Array]:
    prefix, settings = f"model.layers.{layer}.linear_attn", DeltaRuleSettings.of(arch)
    keys, key_width = settings.key_heads, settings.key_width
    group = settings.value_heads // keys
    # The projection puts the parts of one key head side by side: its query, its key, its values, their gates.
    projected = linear(row, state, f"{prefix}.in_proj_qkvz").reshape(keys, -1)
    ends = np.cumsum([key_width, key_width, group * settings.value_width])
    query, key, value, gate = np.split(projected, ends, axis=1)
    rate, rise = np.split(linear(row, state, f"{prefix}.in_proj_ba").reshape(keys, -1), 2, axis=1)
    return step(arch, state, layer, before, Parts(query, key, value, gate, rate, rise))


def _queries_and_gates(arch: Architecture, state: State, layer: int, x: Array) -> Array:
    """The doubled projection of queries, [T, heads, 2 * head_dim]: of each head its query, then its gate."""
    doubled: Array = linear(x, state, f"model.layers.{layer}.self_attn.q_proj").reshape(len(x), arch.heads, -1)
    return doubled


def _project(arch: Architecture, state: State, layer: int, name: str, x: Array) -> Array:
    prefix = f"model.layers.{layer}.self_attn.{name}"
    if name == "q":
        rows = _queries_and_gates(arch, state, layer, x)[..., : arch.head_dim]
    else:
        rows = linear(x, state, f"{prefix}_proj").reshape(len(x), -1, arch.head_dim)
    gain = state.get(f"{prefix}_norm.weight")
    return rows if gain is None else rms_norm(rows, 1 + gain, arch.norm_eps)


def _gate(arch: Architecture, state: State, layer: int, x: Array) -> Array:
    gate: Array = sigmoid(_queries_and_gates(arch, state, layer, x)[..., arch.head_dim :]).reshape(len(x), -1)
    return gate


FORMULAS = Formulas(
    gain=lambda weight: 1 + weight,
    project=_project,
    output_gate=_gate,
    recurrence=Recurrence(initial_state, _step),
    experts=EXPERTS,
)

KINDS = ("linear_attention", "full_attention")


def _attention_interval(fields: Fields, layers: int) -> int:
    """The setting `attention_every` that says which layers have attention."""
    stated_types = fields.get("layer_types")
    if stated_types is None:
        every = fields.integer("full_attention_interval", 4)
        if every < 1:
            raise fields.refuse(f"full_attention_interval is {every}; correct it")
        return every
    # One more than the number of layers stands for no layer with attention, which is refused below.
    for every in range(1, layers + 1):
        if stated_types == [KINDS[(layer + 1) % every == 0] for layer in range(layers)]:
            return every
    raise fields.refuse(
        f"layer_types is {quote_value(stated_types)}; the oracle computes attention in each so many layers the last; "
        "compare --against a backend"
    )


def delta_rule_fields(fields: Fields) -> dict[str, Any]:
    """The settings that families with the gated delta rule share, by name."""
    return {
        "attention_every": _attention_interval(fields, fields.integer("num_hidden_layers")),
        "key_heads": fields.integer("linear_num_key_heads", 16),
        "value_heads": fields.integer("linear_num_value_heads", 32),
        "key_width": fields.integer("linear_key_head_dim", 128),
        "value_width": fields.integer("linear_value_head_dim", 128),
        "conv_width": fields.integer("linear_conv_kernel_dim", 4),
        "rotary_dim": partial_rotary(fields, 0.25),
    }


def _fields(fields: Fields) -> dict[str, Any]:
    if fields.get("mlp_only_layers"):
        raise fields.refuse("mlp_only_layers names layers; the oracle computes decoder_sparse_step alone")
    settings = Qwen3NextSettings(
        **delta_rule_fields(fields),
        experts=num_experts(fields, "num_experts", "num_local_experts", 512),
        experts_per_token=fields.integer("num_experts_per_tok", 10),
        expert_size=fields.integer("moe_intermediate_size", 512),
        shared_size=fields.integer("shared_expert_intermediate_size", 512),
        norm_topk=fields.flag("norm_topk_prob", True),
        sparse_step=fields.integer("decoder_sparse_step", 1),
    )
    return {
        **biases(fields),
        "qk_norm": True,
        "settings": settings,
    }


def delta_net_place(arch: Architecture, name: str, shape: tuple[int, ...]) -> Place:
    """Checkpoints call the gain behind the delta rule the weight of a norm."""
    return Place(name.replace(".linear_attn.gain", ".linear_attn.norm.weight"), shape)


QWEN3_NEXT = OracleFamily(
    "qwen3_next",
    FORMULAS,
    model_types=("qwen3_next",),
    defaults={
        "max_position_embeddings": 32768,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
    },
    slides=no_slides,
    fields=_fields,
    place=delta_net_place,
    partial_rotary=True,
    module_prefixes=("mtp.",),
    refuses={"mlp_only_layers": "empty"},
    nullable=STATED_HEADS,
    nulls=WHOLE_ROTARY,
)
