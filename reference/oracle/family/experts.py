"""Mixtures of experts: Mixtral, Qwen 2 MoE, Qwen 3 MoE, GLM-4 MoE.

See `specverify.reference.family.experts`. A router scores the experts of a row by products with its normed input.
Mixtral and Qwen take the softmax over all experts, choose the largest, and scale the chosen weights to the sum of 1
where asked (Mixtral always does). GLM-4 MoE takes the sigmoid of each score. It chooses by the sigmoid plus a bias,
first among groups by the sum of a group's best two, then among the experts of the open groups, and weighs by the
sigmoid alone (arXiv
2412.19437, section 2.1.2).
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from specverify.reference.architecture import Architecture
from specverify.reference.family.experts import (
    Glm4MoeSettings,
    MixtralSettings,
    Mixture,
    Qwen2MoeSettings,
    Qwen3MoeSettings,
)
from specverify.reference.files.fields import Fields
from specverify.reference.oracle.family.base import (
    STATED_HEADS,
    WHOLE_ROTARY,
    OracleFamily,
    Place,
    biases,
    partial_rotary,
    rope_dictionary,
    sliding_layers,
    window_for_all,
)
from specverify.reference.oracle.formulas.layer import Experts, Formulas, State, gated_block, sigmoid
from specverify.reference.oracle.formulas.routers import Router
from specverify.reference.trace import Array

LEAST = 1e-20
"""Added to the sum of the chosen weights of GLM-4 MoE, as transformers does."""


def router(arch: Architecture, state: State, layer: int, x: Array) -> Router | None:
    """See `Experts.router`."""
    prefix, settings = f"model.layers.{layer}.mlp", Mixture.of(arch)
    if f"{prefix}.gate.weight" not in state:
        return None
    products = x @ state[f"{prefix}.gate.weight"].T
    bias = state.get(f"{prefix}.gate.e_score_correction_bias")
    if settings.by_sigmoid:
        weights = sigmoid(products)
    else:
        exponentials = np.exp(products - products.max(axis=-1, keepdims=True))
        weights = exponentials / exponentials.sum(axis=-1, keepdims=True)
    scores = products if bias is None else weights + bias
    sizes = settings.experts_per_token, settings.groups, settings.top_groups, settings.group_best
    return Router(scores, weights, *sizes)


def _expert_weights(arch: Architecture, router: Router, experts: Array) -> Array:
    """The weights of the chosen experts, [T, experts per token]."""
    weights: Array = np.take_along_axis(router.weights, experts, axis=-1)
    settings = Mixture.of(arch)
    if settings.norm_topk:
        total = np.maximum(weights.sum(axis=-1, keepdims=True), settings.norm_min)
        weights = weights / (total + (LEAST if settings.group_best == 2 else 0.0))
    return weights * settings.routed_scale


def mix_experts(experts: Array, weights: Array, x: Array, expert: Callable[[int, Array], Array]) -> Array:
    """The sum of the outputs of each row's experts, weighted: [T, hidden]; `expert` runs one expert on some rows."""
    mixed = np.zeros_like(x)
    for number in np.unique(experts):
        row, place = np.nonzero(experts == number)
        mixed[row] += weights[row, place, None] * expert(int(number), x[row])
    return mixed


def expert_block(arch: Architecture, state: State, layer: int, x: Array, router: Router, experts: Array) -> Array:
    """See `Experts.mixed`."""
    prefix = f"model.layers.{layer}.mlp"
    weights = _expert_weights(arch, router, experts)
    mixed = mix_experts(
        experts, weights, x, lambda number, rows: gated_block(rows, state, f"{prefix}.experts.{number}")
    )
    gate = state.get(f"{prefix}.shared_expert_gate.weight")
    if gate is not None:
        mixed += sigmoid(x @ gate.T) * gated_block(x, state, f"{prefix}.shared_expert")
    if f"{prefix}.shared_experts.up_proj.weight" in state:
        mixed += gated_block(x, state, f"{prefix}.shared_experts")
    return mixed


EXPERTS = Experts(router, expert_block)
FORMULAS = Formulas(experts=EXPERTS)


def _mixtral(fields: Fields) -> dict[str, Any]:
    content = rope_dictionary(fields)
    kind = content.get("rope_type", content.get("type", "default")) if isinstance(content, dict) else "default"
    if fields.get("head_dim") is None and kind in ("dynamic", "yarn", "longrope"):
        raise fields.refuse(f"head_dim is missing, from which transformers makes the tables of {kind}; add it")
    experts = num_experts(fields, "num_local_experts", "num_experts", 8)
    return {"settings": MixtralSettings(experts, fields.integer("num_experts_per_tok", 2))}


def mixtral_place(arch: Architecture, name: str, shape: tuple[int, ...]) -> Place:
    """The place of a tensor under the names of Mixtral's first release."""
    stored = name.replace(".mlp.", ".block_sparse_moe.")
    for our_name, their_name in (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3")):
        stored = stored.replace(our_name, their_name)
    return Place(stored, shape)


def place_in_stack(arch: Architecture, name: str, shape: tuple[int, ...]) -> Place:
    """The place of a tensor where all experts of a layer stand in one: gate and up side by side, outputs first."""
    if ".mlp.experts." not in name:
        return Place(name, shape)
    prefix, number, part, _ = name.rsplit(".", 3)
    settings, expert, hidden = Mixture.of(arch), int(number), arch.hidden_size
    experts, inner = settings.experts, settings.expert_size or arch.intermediate_size
    if part == "down_proj":
        return Place(f"{prefix}.down_proj", (experts, hidden, inner), lambda values: values[expert])
    rows = slice(None, inner) if part == "gate_proj" else slice(inner, None)
    return Place(f"{prefix}.gate_up_proj", (experts, 2 * inner, hidden), lambda values: values[expert, rows])


def num_experts(fields: Fields, name: str, other_name: str, default: int) -> int:
    """The number of experts, or of those of a row, under either of two names; or transformers' default."""
    counts = {fields.integer(field_name) for field_name in (name, other_name) if fields.get(field_name) is not None}
    if len(counts) > 1:
        raise fields.refuse(f"{name} and {other_name} differ; remove one of them")
    return counts.pop() if counts else default


def _qwen(fields: Fields, experts: int) -> dict[str, Any]:
    if fields.get("mlp_only_layers"):
        raise fields.refuse("mlp_only_layers names layers; the oracle computes decoder_sparse_step alone")
    return {
        "experts": num_experts(fields, "num_experts", "num_local_experts", experts),
        "experts_per_token": fields.integer("num_experts_per_tok"),
        "expert_size": fields.integer("moe_intermediate_size"),
        "norm_topk": fields.flag("norm_topk_prob"),
        "sparse_step": fields.integer("decoder_sparse_step", 1),
    }


def _qwen2_slides(fields: Fields, layers: int, family: str) -> list[bool]:
    """The layers that have the window, none unless `use_sliding_window` is true.

    They are those that `layer_types` names, or without that field the layers 0, 2, ... below `max_window_layers`.
    """
    wants_window, first_whole = fields.flag("use_sliding_window"), fields.integer("max_window_layers", 28)
    stated_slides = sliding_layers(fields, layers)
    if stated_slides is None:
        return [wants_window and layer % 2 == 0 and layer < first_whole for layer in range(layers)]
    if any(stated_slides) and not wants_window:
        raise fields.refuse("layer_types names sliding_attention without a sliding_window; set use_sliding_window")
    return stated_slides


def _qwen3_slides(fields: Fields, layers: int, family: str) -> list[bool]:
    """True for every layer where `use_sliding_window` is true and `sliding_window` no null."""
    return [fields.flag("use_sliding_window") and fields.get("sliding_window") is not None] * layers


def _qwen2(fields: Fields) -> dict[str, Any]:
    settings = Qwen2MoeSettings(**_qwen(fields, 60), shared_size=fields.integer("shared_expert_intermediate_size"))
    return {"qkv_bias": fields.flag("qkv_bias", True), "settings": settings}


def _qwen3(fields: Fields) -> dict[str, Any]:
    return {
        **biases(fields),
        "qk_norm": True,
        "settings": Qwen3MoeSettings(**_qwen(fields, 128)),
    }


def _glm(fields: Fields) -> dict[str, Any]:
    settings = Glm4MoeSettings(
        experts=num_experts(fields, "n_routed_experts", "num_local_experts", 128),
        experts_per_token=fields.integer("num_experts_per_tok"),
        expert_size=fields.integer("moe_intermediate_size"),
        shared_experts=fields.integer("n_shared_experts"),
        dense_layers=fields.integer("first_k_dense_replace"),
        groups=fields.integer("n_group"),
        top_groups=fields.integer("topk_group"),
        norm_topk=fields.flag("norm_topk_prob", True),
        routed_scale=fields.number("routed_scaling_factor", 1.0),
        rotary_dim=partial_rotary(fields, 0.5),
    )
    return {
        "qkv_bias": fields.flag("attention_bias"),
        "qk_norm": fields.flag("use_qk_norm"),
        "settings": settings,
    }


MIXTRAL = OracleFamily(
    "mixtral",
    FORMULAS,
    model_types=("mixtral",),
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
    },
    slides=window_for_all,
    fields=_mixtral,
    place=mixtral_place,
    nullable=STATED_HEADS | {"head_dim"},
)
QWEN2_MOE = OracleFamily(
    "qwen2_moe",
    FORMULAS,
    model_types=("qwen2_moe",),
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "sliding_window": 4096,
    },
    slides=_qwen2_slides,
    fields=_qwen2,
    refuses={"mlp_only_layers": "empty"},
    nullable=STATED_HEADS,
)
QWEN3_MOE = OracleFamily(
    "qwen3_moe",
    FORMULAS,
    model_types=("qwen3_moe",),
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "sliding_window": 4096,
    },
    slides=_qwen3_slides,
    fields=_qwen3,
    refuses={"mlp_only_layers": "empty"},
    nullable=STATED_HEADS,
)
GLM4_MOE = OracleFamily(
    "glm4_moe",
    FORMULAS,
    model_types=("glm4_moe",),
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
    },
    fields=_glm,
    partial_rotary=True,
    wide=("e_score_correction_bias",),
    nullable=STATED_HEADS,
    nulls=WHOLE_ROTARY,
)
