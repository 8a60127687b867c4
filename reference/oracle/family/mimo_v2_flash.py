"""MiMo-V2-Flash: scaled values, a base for layers with a window, and the two forms of its config.json.

After transformers' `models/mimo_v2_flash`.
"""

from typing import Any

from specverify.reference.architecture import Architecture, Rope
from specverify.reference.family.mimo_v2_flash import MiMoV2FlashSettings
from specverify.reference.files.fields import Fields, quote_value
from specverify.reference.oracle.family.base import (
    KINDS_OF_LAYER,
    STATED_HEADS,
    OracleFamily,
    Place,
    rope_without_nulls,
    sliding_layers,
)
from specverify.reference.oracle.family.experts import EXPERTS, num_experts
from specverify.reference.oracle.formulas.layer import Formulas, State, linear
from specverify.reference.trace import Array


def _project(arch: Architecture, state: State, layer: int, name: str, x: Array) -> Array:
    sizes = arch.layer_heads(layer)
    rows = linear(x, state, f"model.layers.{layer}.self_attn.{name}_proj")
    if name != "v":
        return rows.reshape(len(x), -1, sizes.head_dim)
    return rows.reshape(len(x), -1, sizes.value_dim) * MiMoV2FlashSettings.of(arch).value_scale


def _rope_of(arch: Architecture, layer: int) -> Rope:
    """Layers with a window have no variant, and a base of their own."""
    if not arch.windows[layer]:
        return arch.rope
    return Rope(theta=MiMoV2FlashSettings.of(arch).local_theta or arch.rope.theta)


def _slides(fields: Fields, layers: int, family: str) -> list[bool]:
    """The layers that `layer_types` names; without it all but the first and each sixth."""
    stated_slides = sliding_layers(fields, layers)
    if stated_slides is not None:
        return stated_slides
    return [layer != 0 and (layer + 1) % 6 != 0 for layer in range(layers)]


SHARE = 0.334
"""The share of a head's dimensions that rotary embedding turns where a file says none."""

ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 5_000_000.0, "partial_rotary_factor": SHARE},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": SHARE},
}
"""The rope dictionaries of a file without any."""


def _ropes(fields: Fields) -> tuple[dict[str, Any], float, int]:
    """The rope dictionary of the layers without a window, the base of the others, and the width that is turned."""
    stated = fields.get("rope_parameters")
    content = ROPES if stated is None else stated
    if "rope_scaling" in fields.content:
        raise fields.refuse("rope_scaling beside rope_parameters of kinds of layers; remove it")
    if stated is None and "rope_theta" in fields.content:
        raise fields.refuse("rope_theta is a field of the first release; state rope_parameters of kinds of layers")
    if not isinstance(content, dict) or not all(isinstance(content.get(kind), dict) for kind in KINDS_OF_LAYER):
        raise fields.refuse("rope_parameters is no object of full_attention and sliding_attention; correct it")
    full, sliding = (rope_without_nulls(fields, content[kind]) for kind in KINDS_OF_LAYER)
    for rope in (full, sliding):
        if rope.get("rope_type") != "default":
            raise fields.refuse("rope_parameters gives layers a variant of rotary embedding, which is not computed")
    widths = []
    for rope in (full, sliding):
        rope_fields = Fields(fields.where, rope, {})
        rope_fields.number("rope_theta")
        widths.append(int(fields.integer("head_dim") * rope_fields.number("partial_rotary_factor", SHARE)))
    if widths[0] != widths[1] or not 2 <= widths[0] <= fields.integer("head_dim"):
        raise fields.refuse("partial_rotary_factor leaves no equal widths to turn; compare --against a backend")
    base = float(sliding["rope_theta"])
    if not base > 1:
        raise fields.refuse(f"the base of rotary embedding in layers with a window is {base}; correct it")
    return full, base, widths[0]


FIXED: dict[str, Any] = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "add_full_attention_sink_bias": False,
    "add_swa_attention_sink_bias": True,
    "n_shared_experts": 0,
}
"""Fields of published files that transformers does not read, each with the value that its class computes."""

OLDER = ("hybrid_layer_pattern", "moe_layer_freq", "swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim",
         "swa_num_attention_heads", "swa_rope_theta", "layernorm_epsilon", "attention_chunk_size")  # fmt: skip
"""Fields of the first release, which transformers 5.23 does not read."""


def _dense_layers(fields: Fields, layers: int) -> int:
    """The number of leading layers without experts that `mlp_layer_types` names; without it the first alone."""
    kinds = fields.get("mlp_layer_types")
    if kinds is None:
        return 1
    counts = [dense for dense in range(layers + 1) if kinds == ["dense"] * dense + ["sparse"] * (layers - dense)]
    if not counts:
        raise fields.refuse(f"mlp_layer_types is {quote_value(kinds)}; the oracle computes dense layers first alone")
    return counts[0]


def _fields(fields: Fields) -> dict[str, Any]:
    for name, computed in FIXED.items():
        value = fields.get(name)
        if value is not None and value != computed:
            raise fields.refuse(f"{name} is {quote_value(value)}; the oracle computes {computed!r} alone")
    for name in OLDER:
        if fields.content.get(name) is not None:
            raise fields.refuse(f"{name} is a field of the first release, which transformers does not read; convert it")
    if fields.content.get("sliding_window_size") is not None:
        raise fields.refuse("sliding_window_size is a field of the first release; state sliding_window, one more")
    full, base, width = _ropes(fields)
    head_dim, scale = fields.integer("head_dim"), fields.get("attention_value_scale")
    value_scale = (
        1.0
        if scale is None and "attention_value_scale" in fields.content
        else float(fields.number("attention_value_scale", 0.707))
    )
    factor = fields.get("routed_scaling_factor")
    settings = MiMoV2FlashSettings(
        value_dim=fields.integer("v_head_dim"),
        value_scale=value_scale,
        local_theta=0.0 if base == full["rope_theta"] else base,
        rotary_dim=0 if width == head_dim else width,
        experts=num_experts(fields, "n_routed_experts", "num_local_experts", 256),
        experts_per_token=fields.integer("num_experts_per_tok", 8),
        expert_size=fields.integer("moe_intermediate_size", 2048),
        dense_layers=_dense_layers(fields, fields.integer("num_hidden_layers")),
        groups=fields.integer("n_group", 1),
        top_groups=fields.integer("topk_group", 1),
        norm_topk=fields.flag("norm_topk_prob", True),
        routed_scale=1.0 if factor is None else float(fields.number("routed_scaling_factor")),
    )
    return {"qkv_bias": fields.flag("attention_bias"), "settings": settings}


def _place(arch: Architecture, name: str, shape: tuple[int, ...]) -> Place:
    return Place(name.replace(".self_attn.sinks", ".self_attn.attention_sink_bias"), shape)


MIMO_V2_FLASH = OracleFamily(
    "mimo_v2_flash",
    Formulas(project=_project, rope=_rope_of, experts=EXPERTS),
    model_types=("mimo_v2_flash",),
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 4,
        "head_dim": 192,
        "v_head_dim": 128,
        "rms_norm_eps": 1e-5,
        "sliding_window": 129,
    },
    slides=_slides,
    fields=_fields,
    place=_place,
    partial_rotary=True,
    rope=lambda fields: _ropes(fields)[0],
    layered_rope=True,
    refuses={name: str(value).lower() for name, value in FIXED.items()},
    module_prefixes=("model.mtp.",),
    nullable=(STATED_HEADS - {"sliding_window", "partial_rotary_factor"})
    | {"mlp_layer_types", "routed_scaling_factor", "attention_value_scale", *FIXED},
    sample={"num_key_value_heads": 2},
    wide=("e_score_correction_bias",),
)
