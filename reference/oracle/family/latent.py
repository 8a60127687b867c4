"""Multi-head latent attention: DeepSeek-V2, DeepSeek-V3, Kimi K2.

See `specverify.reference.family.latent`. Formulas after arXiv 2405.04434, section 2.1, and transformers'
`models/deepseek_v3`: the latent vector and compressed queries go through a norm of their own epsilon; the scale of
scores is that of the whole head, nope and rope, times the square of yarn's magnitude for `mscale_all_dim`.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from specverify.reference.architecture import Architecture
from specverify.reference.family.latent import DeepseekV2Settings, DeepseekV3Settings
from specverify.reference.files.fields import Fields, quote_value
from specverify.reference.oracle.family.base import NULLABLE, OracleFamily, biases, check_head_split, rope_dictionary
from specverify.reference.oracle.family.experts import EXPERTS, num_experts
from specverify.reference.oracle.formulas import rotary
from specverify.reference.oracle.formulas.layer import Formulas, State, linear, rms_norm
from specverify.reference.trace import Array

EPSILON = 1e-6
"""The epsilon of the norms of latent vectors and compressed queries, whatever `rms_norm_eps` says."""


def compress(arch: Architecture, state: State, layer: int, x: Array) -> tuple[Array, Array]:
    """The latent vectors [T, rank] and the part of keys to be rotated [T, rotary_dim] of rows `x` [T, hidden]."""
    prefix, rank = f"model.layers.{layer}.self_attn", arch.settings.latent_rank
    joined = linear(x, state, f"{prefix}.kv_a_proj_with_mqa")
    return rms_norm(joined[:, :rank], state[f"{prefix}.kv_a_layernorm.weight"], EPSILON), joined[:, rank:]


def _project(arch: Architecture, state: State, layer: int, name: str, x: Array) -> Array:
    """Queries, keys or values [T, heads, width] of rows `x` [T, hidden], not rotated yet."""
    prefix, nope = f"model.layers.{layer}.self_attn", arch.head_dim - arch.rotary_dim
    if name == "q":
        if f"{prefix}.q_proj.weight" in state:
            return linear(x, state, f"{prefix}.q_proj").reshape(len(x), arch.heads, -1)
        compressed_queries = rms_norm(
            linear(x, state, f"{prefix}.q_a_proj"), state[f"{prefix}.q_a_layernorm.weight"], EPSILON
        )
        return linear(compressed_queries, state, f"{prefix}.q_b_proj").reshape(len(x), arch.heads, -1)
    latent, shared = compress(arch, state, layer, x)
    joined = linear(latent, state, f"{prefix}.kv_b_proj").reshape(len(x), arch.heads, -1)
    if name == "v":
        return joined[..., nope:]
    repeated = np.repeat(shared[:, None], arch.heads, axis=1)
    return np.concatenate([joined[..., :nope], repeated], axis=-1)


def _rotate(arch: Architecture, x: Array, cos: Array, sin: Array) -> Array:
    """Each head with its last dimensions turned; DeepSeek-V3 puts the first ones of all pairs before the second."""
    nope = x.shape[-1] - 2 * cos.shape[-1]
    part = x[..., nope:]
    settings = arch.settings
    if not isinstance(settings, DeepseekV3Settings):
        part = rotary.turn_neighbours(part, cos, sin)
    else:
        if settings.interleaved:
            part = np.concatenate([part[..., 0::2], part[..., 1::2]], axis=-1)
        part = rotary.turn(part, cos, sin)
    return np.concatenate([x[..., :nope], part], axis=-1)


def _scale(arch: Architecture) -> float:
    rope, plain = arch.rope, 1 / math.sqrt(arch.head_dim)
    if rope.kind == "default" or not rope.mscale_all_dim or rope.factor <= 1:
        return plain
    return plain * (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2


def latent_rows(arch: Architecture, state: State, layer: int, x: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
    """The latent rows of `x` [T, hidden]: latent vectors [T, rank], and rotated parts [T, rotary_dim]."""
    latent, shared = compress(arch, state, layer, x)
    return latent, _rotate(arch, shared, cos, sin)


FORMULAS = Formulas(
    experts=EXPERTS,
    project=_project,
    rotate=_rotate,
    score_scale=_scale,
    latent_rows=latent_rows,
)


def _rope(fields: Fields) -> Any:
    content = rope_dictionary(fields)
    rope_fields = Fields(fields.where, content if isinstance(content, dict) else {}, {})
    kind = rope_fields.get("rope_type") or rope_fields.get("type")
    if kind == "yarn" and rope_fields.get("factor") is None:
        raise fields.refuse("rope factor is null or missing, and scores are scaled by it; state its value")
    if kind == "longrope" and rope_fields.number("mscale_all_dim", 0.0):
        raise fields.refuse("rope mscale_all_dim with longrope: its factor is not read; compare --against a backend")
    return content


def _refuse_other_values(fields: Fields, computed_values: Mapping[str, Any]) -> None:
    """Refuse a field with another value than the one that is computed; transformers does not read these fields."""
    for name, computed in computed_values.items():
        value = fields.get(name)
        if value is not None and (value != computed or isinstance(value, bool) != isinstance(computed, bool)):
            raise fields.refuse(f"{name} is {quote_value(value)}; the oracle computes {quote_value(computed)} alone")


def _attention_fields(fields: Fields) -> tuple[dict[str, Any], dict[str, Any]]:
    rotated = fields.integer("qk_rope_head_dim")
    heads = fields.integer("num_attention_heads")
    sizes = {
        "head_dim": fields.integer("qk_nope_head_dim") + rotated,
        "kv_heads": fields.integer("num_key_value_heads", heads),
        **biases(fields),
    }
    rank = 0 if fields.get("q_lora_rank") is None else fields.integer("q_lora_rank")
    if fields.get("q_lora_rank") is not None and rank < 1:
        raise fields.refuse(f"q_lora_rank is {rank}; null stands for queries without compression")
    if fields.get("head_dim") not in (None, rotated):  # transformers takes the rotary tables from this field
        raise fields.refuse(f"head_dim is {quote_value(fields.get('head_dim'))}, and qk_rope_head_dim is {rotated}")
    if rotated < 2:
        raise fields.refuse(f"qk_rope_head_dim is {rotated}; rotary embedding turns pairs")
    return sizes, {
        "query_rank": rank,
        "latent_rank": fields.integer("kv_lora_rank"),
        "rotary_dim": rotated,
        "value_dim": fields.integer("v_head_dim"),
    }


def _expert_settings(fields: Fields, other_name: str, default: int) -> dict[str, Any]:
    return {
        "experts": num_experts(fields, "n_routed_experts", other_name, default),
        "experts_per_token": fields.integer("num_experts_per_tok"),
        "expert_size": fields.integer("moe_intermediate_size"),
        "shared_experts": fields.integer("n_shared_experts"),
        "dense_layers": fields.integer("first_k_dense_replace"),
        "routed_scale": fields.number("routed_scaling_factor"),
        "groups": fields.integer("n_group", 1),
        "top_groups": fields.integer("topk_group", 1),
    }


def _v3(fields: Fields) -> dict[str, Any]:
    if "num_key_value_heads" not in fields.content and fields.integer("num_attention_heads") != HEADS:
        raise fields.refuse(f"num_key_value_heads is missing, and transformers then has {HEADS}; add it")
    _refuse_other_values(fields, {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1})
    sizes, settings = _attention_fields(fields)
    settings |= {
        **_expert_settings(fields, "num_local_experts", 256),
        "norm_topk": fields.flag("norm_topk_prob", True),
        "interleaved": fields.flag("rope_interleave", True),
    }
    return {**sizes, "settings": DeepseekV3Settings(**settings)}


def _v2(fields: Fields) -> dict[str, Any]:
    check_head_split(fields)
    for name in ("kv_lora_rank", "qk_nope_head_dim"):
        if fields.integer(name) % 2:
            raise fields.refuse(f"{name} is {fields.integer(name)}: rotary embedding turns pairs where they lie")
    _refuse_other_values(
        fields, {"scoring_func": "softmax", "norm_topk_prob": False, "moe_layer_freq": 1, "mlp_bias": False}
    )
    sizes, settings = _attention_fields(fields)
    settings |= _expert_settings(fields, "num_experts", 64)
    method = fields.get("topk_method")
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.refuse(f"topk_method is {quote_value(method)}, neither greedy nor group_limited_greedy")
    if method == "greedy":
        settings |= {"groups": 1, "top_groups": 1}
    return {**sizes, "settings": DeepseekV2Settings(**settings)}


HEADS = 128
"""The heads of keys and values in transformers' DeepSeek V3 where the file says nothing of them."""

DEFAULTS = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}

DEEPSEEK_V3 = OracleFamily(
    "deepseek_v3",
    FORMULAS,
    model_types=("deepseek_v3", "kimi_k2"),
    defaults={
        **DEFAULTS,
        "max_position_embeddings": 4096,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "routed_scaling_factor": 2.5,
    },
    fields=_v3,
    rope=_rope,
    refuses={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": "1"},
    wide=("e_score_correction_bias",),
    nullable=NULLABLE | {"q_lora_rank", "n_group", "topk_group"},
    nulls={"norm_topk_prob": False, "rope_interleave": False},
)
DEEPSEEK_V2 = OracleFamily(
    "deepseek_v2",
    FORMULAS,
    model_types=("deepseek_v2",),
    defaults={
        **DEFAULTS,
        "max_position_embeddings": 2048,
        "n_shared_experts": 2,
        "first_k_dense_replace": 0,
        "topk_method": "greedy",
        "moe_intermediate_size": 1407,
        "routed_scaling_factor": 1.0,
    },
    fields=_v2,
    rope=_rope,
    refuses={"scoring_func": "softmax", "norm_topk_prob": "false", "moe_layer_freq": "1", "mlp_bias": "false"},
    nullable=NULLABLE | {"q_lora_rank", "n_group", "topk_group", "norm_topk_prob"},
)
