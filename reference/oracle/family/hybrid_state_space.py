"""Falcon-H1: a Mamba-2 mixer beside attention, and factors on most projections.

After transformers' `models/falcon_h1` and arXiv 2405.21060, section 2: the state of a head decays by a share that the
row chooses, and takes up the row's value at its key; the row's query reads it.
"""

from typing import Any

import numpy as np

from specverify.reference.architecture import Architecture
from specverify.reference.family.hybrid_state_space import FalconH1Settings
from specverify.reference.files.fields import Fields, quote_value
from specverify.reference.oracle.family.base import NULLABLE, OracleFamily, Place, biases, no_slides
from specverify.reference.oracle.formulas.layer import Formulas, State, linear, rms_norm, silu
from specverify.reference.oracle.formulas.recurrence import LayerState, Recurrence, convolve
from specverify.reference.trace import Array


def _initial_state(arch: Architecture) -> LayerState:
    settings = FalconH1Settings.of(arch)
    memory = np.zeros((settings.mixer_heads, settings.mixer_width, settings.state_width))
    return np.zeros((settings.conv_width - 1, settings.inner + 2 * settings.shared)), memory


def state_space(memory: Array, value: Array, key: Array, query: Array, rate: Array, time: Array) -> tuple[Array, Array]:
    """One step of the selective state space: the memory after it, and what the query reads from it [heads, width].

    Args:
        memory: [heads, width, state width].
        value: [heads, width].
        key: [heads, state width], as `query`.
        query: See key.
        rate: How fast a head forgets, a positive number, [heads].
        time: The length of the step, [heads].
    """
    memory_after = memory * np.exp(-rate * time)[:, None, None]
    memory_after = memory_after + np.einsum("h,hv,hk->hvk", time, value, key)
    return memory_after, np.einsum("hvk,hk->hv", memory_after, query)


def _step(arch: Architecture, state: State, layer: int, before: LayerState, row: Array) -> tuple[LayerState, Array]:
    prefix, settings = f"model.layers.{layer}.mamba", FalconH1Settings.of(arch)
    heads, groups, inner, shared = settings.mixer_heads, settings.mixer_groups, settings.inner, settings.shared
    # The parts of the projection: gate, value, key, query, and the length of the step.
    factors = np.repeat(settings.part_multipliers, [inner, inner, shared, shared, heads])
    parts = linear(row * settings.mixer_in_multiplier, state, f"{prefix}.in_proj") * factors
    gate, entering, rise = np.split(parts, [inner, 2 * (inner + shared)])
    mixed, window = convolve(before[0], entering, state[f"{prefix}.conv1d.weight"][:, 0])
    mixed = silu(mixed + state.get(f"{prefix}.conv1d.bias", 0.0))
    value = mixed[:inner].reshape(heads, -1)
    key, query = (np.repeat(rows.reshape(groups, -1), heads // groups, axis=0) for rows in np.split(mixed[inner:], 2))
    time = np.logaddexp(0.0, rise + state[f"{prefix}.dt_bias"])
    memory, output = state_space(before[1], value, key, query, np.exp(state[f"{prefix}.A_log"]), time)
    out = _gate_and_norm(
        arch, state, f"{prefix}.norm.weight", (output + state[f"{prefix}.D"][:, None] * value).ravel(), gate
    )
    return (window, memory), linear(out, state, f"{prefix}.out_proj") * settings.mixer_out_multiplier


def _gate_and_norm(arch: Architecture, state: State, gain: str, read: Array, gate: Array) -> Array:
    """What the mixer read [heads * width], times silu of `gate`, and normed by group where the model has that norm."""
    if gain not in state:
        return read * silu(gate)
    settings = FalconH1Settings.of(arch)
    groups, first = settings.mixer_groups, settings.norm_before_gate
    rows = (read if first else read * silu(gate)).reshape(groups, -1)
    normed = rms_norm(rows, state[gain].reshape(groups, -1), arch.norm_eps).ravel()
    return normed * silu(gate) if first else normed


def _project(arch: Architecture, state: State, layer: int, name: str, x: Array) -> Array:
    settings = FalconH1Settings.of(arch)
    y = linear(x * settings.attention_in_multiplier, state, f"model.layers.{layer}.self_attn.{name}_proj")
    by_head: Array = y.reshape(len(x), -1, arch.head_dim)
    return by_head * settings.key_multiplier if name == "k" else by_head


def _feed_forward(arch: Architecture, state: State, layer: int, x: Array) -> Array:
    settings = FalconH1Settings.of(arch)
    gate, up = (linear(x, state, f"model.layers.{layer}.mlp.{name}_proj") for name in ("gate", "up"))
    inner = silu(gate * settings.gate_multiplier) * up
    return linear(inner, state, f"model.layers.{layer}.mlp.down_proj") * settings.down_multiplier


def _factors(fields: Fields, name: str, count: int) -> list[float]:
    """The numbers of the list `name`; ones where the file has no such list."""
    numbers = fields.get(name)
    if numbers is None:
        return [1.0] * count
    is_list = isinstance(numbers, list) and len(numbers) == count
    if not is_list or any(type(number) not in (int, float) for number in numbers):
        raise fields.refuse(f"{name} is {quote_value(numbers)}, no list of {count} numbers; correct it")
    return [float(number) for number in numbers]


def _fields(fields: Fields) -> dict[str, Any]:
    limit = fields.get("time_step_limit")
    # transformers clamps the steps of a prompt alone, so that a limit of its own makes two models of one. Version 5
    # writes an object for infinity.
    if limit not in (None, [0, float("inf")], [0, {"__float__": "Infinity"}]):
        raise fields.refuse(f"time_step_limit is {quote_value(limit)}; the oracle computes steps without a limit")
    heads, inner = fields.integer("mamba_n_heads", 128), fields.integer("mamba_d_ssm", 0)
    # Null derives the width from that of the residual stream.
    inner = inner or fields.integer("mamba_expand", 2) * fields.integer("hidden_size")
    width = fields.get("mamba_d_head")
    if isinstance(width, float):
        raise fields.refuse(f"field mamba_d_head is {width}, not a whole number; correct it")
    if "layer_types" in fields.content:
        raise fields.refuse("layer_types stands in no config of Falcon-H1, and transformers fails over it; remove it")
    if heads < 1 or inner % heads or width not in (None, "auto", inner // heads):
        raise fields.refuse(f"mamba_d_ssm of {inner} does not fit mamba_n_heads and mamba_d_head; correct it")
    gate, down = _factors(fields, "mlp_multipliers", 2)
    part_multipliers = _factors(fields, "ssm_multipliers", 5)
    gated_norm, first = fields.flag("mamba_rms_norm"), fields.flag("mamba_norm_before_gate", True)
    settings = FalconH1Settings(
        mixer_heads=heads,
        mixer_width=inner // heads,
        mixer_groups=fields.integer("mamba_n_groups", 1),
        state_width=fields.integer("mamba_d_state", 256),
        conv_width=fields.integer("mamba_d_conv", 4),
        conv_bias=fields.flag("mamba_conv_bias", True),
        mixer_bias=fields.flag("mamba_proj_bias"),
        mixer_output_bias=fields.flag("projectors_bias"),
        gated_norm=gated_norm,
        norm_before_gate=first or not gated_norm,  # says nothing without the norm
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        logits_multiplier=fields.number("lm_head_multiplier", 1.0),
        key_multiplier=fields.number("key_multiplier", 1.0),
        attention_in_multiplier=fields.number("attention_in_multiplier", 1.0),
        attention_out_multiplier=fields.number("attention_out_multiplier", 1.0),
        mixer_in_multiplier=fields.number("ssm_in_multiplier", 1.0),
        mixer_out_multiplier=fields.number("ssm_out_multiplier", 1.0),
        gate_multiplier=gate,
        down_multiplier=down,
        mixer_gate_multiplier=part_multipliers[0],
        mixer_value_multiplier=part_multipliers[1],
        mixer_key_multiplier=part_multipliers[2],
        mixer_query_multiplier=part_multipliers[3],
        mixer_time_multiplier=part_multipliers[4],
    )
    return {
        **biases(fields),
        "mlp_bias": fields.flag("mlp_bias"),
        "settings": settings,
    }


def stored_name(name: str) -> str:
    """The name of a tensor of `specverify.reference.weights` in a checkpoint of Falcon-H1."""
    return name.replace(".mlp.", ".feed_forward.").replace("model.norm.", "model.final_layernorm.")


FALCON_H1 = OracleFamily(
    "falcon_h1",
    Formulas(
        project=_project,
        feed_forward=_feed_forward,
        recurrence=Recurrence(_initial_state, _step),
        embedding_scale=lambda arch: FalconH1Settings.of(arch).embedding_multiplier,
        embedding_rounded=False,  # a factor of Python, which torch multiplies by in float32 for 16 bits
        attention_scale=lambda arch: FalconH1Settings.of(arch).attention_out_multiplier,
        logits=lambda arch, scored: scored * FalconH1Settings.of(arch).logits_multiplier,
    ),
    model_types=("falcon_h1",),
    defaults={
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "mamba_d_ssm": 1024,
    },
    slides=no_slides,
    fields=_fields,
    place=lambda arch, name, shape: Place(stored_name(name), shape),
    nullable=NULLABLE | {"mlp_multipliers", "ssm_multipliers", "mamba_d_ssm"},
    nulls=dict.fromkeys(
        ("mamba_conv_bias", "mamba_norm_before_gate", "mamba_proj_bias", "mamba_rms_norm", "projectors_bias"), False
    ),
)
