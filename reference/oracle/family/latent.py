"""Multi-head latent attention: DeepSeek-V2, DeepSeek-V3, Kimi K2.

See `specverify.reference.family.latent`. Formulas after arXiv 2405.04434, section 2.1, and transformers'
`models/deepseek_v3`: the latent vector and compressed queries go through a norm of their own epsilon; the scale of
scores is that of the whole head, nope and rope, times the square of yarn's magnitude for `mscale_all_dim`.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from specverify.reference.architecture import Architecture
from specverify.reference.family.latent import DeepseekV2Settings, DeepseekV3Settings, IndexedSettings
from specverify.reference.files.fields import Fields, quote_value
from specverify.reference.oracle.family.base import NULLABLE, OracleFamily, biases, check_head_split, rope_dictionary
from specverify.reference.oracle.family.experts import EXPERTS, num_experts
from specverify.reference.oracle.formulas import rotary
from specverify.reference.oracle.formulas.layer import Formulas, Indexer, State, layer_norm, linear, rms_norm
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


def _turned(arch: Architecture, x: Array, cos: Array, sin: Array) -> Array:
    """Index queries or keys [..., T, width], their first dimensions turned: halves in V3.2, neighbours in GLM-5."""
    width = 2 * cos.shape[-1]
    part = x[..., :width]
    if arch.family == "glm_moe_dsa":
        part = np.concatenate([part[..., 0::2], part[..., 1::2]], axis=-1)
    return np.concatenate([rotary.turn(part, cos, sin), x[..., width:]], axis=-1)


def _index_keys(arch: Architecture, state: State, layer: int, x: Array, cos: Array, sin: Array) -> Array:
    """See `Indexer.keys`: one key for all heads, behind a LayerNorm with a bias."""
    prefix = f"model.layers.{layer}.self_attn.indexer"
    normed = layer_norm(linear(x, state, f"{prefix}.wk"), state[f"{prefix}.k_norm.weight"], EPSILON)
    return _turned(arch, normed + state[f"{prefix}.k_norm.bias"], cos, sin)


def _index_queries(
    arch: Architecture, state: State, layer: int, x: Array, cos: Array, sin: Array
) -> tuple[Array, Array]:
    """See `Indexer.queries`; they come from the compressed queries of attention."""
    prefix, heads = f"model.layers.{layer}.self_attn", IndexedSettings.of(arch).index_heads
    compressed_queries = rms_norm(
        linear(x, state, f"{prefix}.q_a_proj"), state[f"{prefix}.q_a_layernorm.weight"], EPSILON
    )
    by_head = linear(compressed_queries, state, f"{prefix}.indexer.wq_b").reshape(len(x), heads, -1)
    queries = _turned(arch, by_head.swapaxes(0, 1), cos, sin).swapaxes(0, 1)
    return queries, linear(x, state, f"{prefix}.indexer.weights_proj")


def _index_score(weights: Array, products: Array) -> Array:
    """See `Indexer.score`: a weighted sum of rectified products. Factors that all columns share choose nothing."""
    scores: Array = weights @ np.maximum(products, 0.0)
    return scores


INDEXED_FORMULAS = replace(FORMULAS, indexer=Indexer(_index_keys, _index_queries, _index_score))


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


def _no_window(fields: Fields, layers: int, family: str) -> list[bool]:
    """False for every layer; `layer_types` may say indexed_attention alone."""
    types = fields.get("layer_types")
    if types is not None and types != ["indexed_attention"] * layers:
        raise fields.refuse(f"layer_types must say indexed_attention for each of {layers} layers; correct it")
    return [False] * layers


def _dense_layers(fields: Fields, layers: int) -> int:
    """The number of leading layers without experts."""
    types = fields.get("mlp_layer_types")
    if types is None:
        return min(fields.integer("first_k_dense_replace"), layers)
    dense = types.count("dense") if isinstance(types, list) else 0
    if types != ["dense"] * dense + ["sparse"] * (layers - dense):
        raise fields.refuse("mlp_layer_types must say dense for the first layers and sparse for the others; correct it")
    return dense


def _following_layers(fields: Fields, layers: int) -> int:
    """The layers that take the columns of the one before, as the sum of 2**layer."""
    types = fields.get("indexer_types")
    pattern = fields.get("index_topk_pattern")
    if types is None and isinstance(pattern, str):
        types = [{"F": "full", "S": "shared"}.get(letter) for letter in pattern]
    elif types is None and pattern is not None:
        types = pattern
    if types is None:
        every, offset = max(fields.integer("index_topk_freq", 1), 1), fields.integer("index_skip_topk_offset", 2)
        types = ["shared" if max(layer - offset + 1, 0) % every else "full" for layer in range(layers)]
    if not isinstance(types, list) or len(types) != layers or not all(kind in ("full", "shared") for kind in types):
        raise fields.refuse(f"indexer_types must say full or shared for each of {layers} layers; correct it")
    if types[0] == "shared":
        raise fields.refuse("indexer_types says shared for the first layer, which has none before it; correct it")
    return sum(2**layer for layer, kind in enumerate(types) if kind == "shared")


def _read_indexed(fields: Fields, family: str) -> dict[str, Any]:
    _refuse_other_values(
        fields,
        {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "rope_interleave": True,
         "indexer_rope_interleave": family == "glm_moe_dsa"},
    )  # fmt: skip
    fields.flag("mlp_bias")  # transformers' blocks have no biases, whatever it says
    other_count = fields.get("num_experts")
    if other_count is not None and other_count != fields.get("n_routed_experts"):
        raise fields.refuse("num_experts is not n_routed_experts; remove it")
    layers, rotated = fields.integer("num_hidden_layers"), fields.integer("qk_rope_head_dim")
    if rotated < 2:
        raise fields.refuse(f"qk_rope_head_dim is {rotated}; rotary embedding turns pairs")
    settings = {
        **_expert_settings(fields, "num_local_experts", 256),
        "query_rank": fields.size("q_lora_rank"),
        "latent_rank": fields.integer("kv_lora_rank"),
        "rotary_dim": rotated,
        "value_dim": fields.integer("v_head_dim"),
        "dense_layers": _dense_layers(fields, layers),
        "norm_topk": fields.flag("norm_topk_prob", True),
        "index_heads": fields.integer("index_n_heads"),
        "index_width": fields.integer("index_head_dim"),
        "index_columns": fields.integer("index_topk"),
        "following_layers": _following_layers(fields, layers) if family == "glm_moe_dsa" else 0,
    }
    return {
        "head_dim": fields.integer("qk_nope_head_dim") + rotated,
        "kv_heads": fields.integer("num_key_value_heads"),
        **biases(fields),
        "settings": IndexedSettings(**settings),
    }


INDEXED_REFUSES = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": "1",
    "rope_interleave": "true",
}

INDEXED_DEFAULTS = {
    **DEFAULTS,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 2.5,
    "index_topk": 2048,
    "index_head_dim": 128,
}

INDEXED_NULLABLE = (NULLABLE - {"num_key_value_heads"}) | {
    "mlp_layer_types", "indexer_types", "index_topk_pattern", "num_experts", "scoring_func", "topk_method",
    "moe_layer_freq", "indexer_rope_interleave",
}  # fmt: skip

DEEPSEEK_V32 = OracleFamily(
    "deepseek_v32",
    INDEXED_FORMULAS,
    model_types=("deepseek_v32",),
    defaults={
        **INDEXED_DEFAULTS,
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_group": 8,
        "topk_group": 4,
        "index_n_heads": 64,
        "max_position_embeddings": 163840,
    },
    slides=_no_window,
    fields=lambda fields: _read_indexed(fields, "deepseek_v32"),
    rope=_rope,
    refuses={**INDEXED_REFUSES, "indexer_rope_interleave": "false"},
    wide=("e_score_correction_bias", "indexer.weights_proj.weight"),
    nullable=INDEXED_NULLABLE,
)
GLM_MOE_DSA = OracleFamily(
    "glm_moe_dsa",
    INDEXED_FORMULAS,
    model_types=("glm_moe_dsa",),
    defaults={
        **INDEXED_DEFAULTS,
        "vocab_size": 154880,
        "hidden_size": 6144,
        "intermediate_size": 12288,
        "num_hidden_layers": 78,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_group": 1,
        "topk_group": 1,
        "index_n_heads": 32,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202752,
    },
    slides=_no_window,
    fields=lambda fields: _read_indexed(fields, "glm_moe_dsa"),
    rope=_rope,
    refuses={**INDEXED_REFUSES, "indexer_rope_interleave": "true"},
    wide=("e_score_correction_bias", "indexer.weights_proj.weight"),
    nullable=INDEXED_NULLABLE,
)
