"""MiniMax-M2: the fields of its config.json, and the names of its tensors.

After transformers' `models/minimax_m2`.
"""

from typing import Any

from specverify.reference.architecture import Architecture
from specverify.reference.family.minimax_m2 import MiniMaxM2Settings
from specverify.reference.files.fields import Fields, quote_value
from specverify.reference.oracle.family.base import STATED_HEADS, WHOLE_ROTARY, OracleFamily, Place, partial_rotary
from specverify.reference.oracle.family.experts import EXPERTS, mixtral_place, num_experts
from specverify.reference.oracle.formulas.layer import Formulas

FIXED: dict[str, Any] = {
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "use_routing_bias": True,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
}
"""Fields of published files that transformers does not read, each with the value that its class computes."""


def _fields(fields: Fields) -> dict[str, Any]:
    for name, computed in FIXED.items():
        value = fields.get(name)
        if value is not None and value != computed:
            raise fields.refuse(f"{name} is {quote_value(value)}; the oracle computes {computed!r} alone")
    kinds = fields.get("attn_type_list")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != 1 for kind in kinds)):
        raise fields.refuse("attn_type_list names layers without attention; the oracle computes 1 for each layer alone")
    # Released files state the width itself, which the factor of the rope dictionary or of the file goes before.
    width = fields.get("rotary_dim")
    share = 1.0 if width is None else fields.integer("rotary_dim") / max(1, fields.integer("head_dim"))
    settings = MiniMaxM2Settings(
        experts=num_experts(fields, "num_local_experts", "num_experts", 256),
        experts_per_token=fields.integer("num_experts_per_tok", 8),
        rotary_dim=partial_rotary(fields, share),
    )
    return {"qk_norm": True, "settings": settings}


def _place(arch: Architecture, name: str, shape: tuple[int, ...]) -> Place:
    return mixtral_place(arch, name.replace(".gate.e_score", ".e_score"), shape)


MINIMAX_M2 = OracleFamily(
    "minimax_m2",
    Formulas(experts=EXPERTS),
    model_types=("minimax_m2",),
    defaults={
        "max_position_embeddings": 196608,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000000.0,
    },
    fields=_fields,
    place=_place,
    partial_rotary=True,
    refuses={**{name: str(value).lower() for name, value in FIXED.items()}, "attn_type_list": "1 for each layer"},
    nullable=STATED_HEADS | {"rotary_dim", "attn_type_list", *FIXED},
    nulls=WHOLE_ROTARY,
    wide=("e_score_correction_bias",),
)
