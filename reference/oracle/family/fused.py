"""Phi-3 and GLM-4, with partial rotary embedding and fused projections.

After transformers' `models/phi3` and `models/glm4`. Checkpoints hold gate and up in one tensor, and Phi-3's hold
queries, keys and values in one. GLM-4 turns neighbouring dimensions together.
"""

from typing import Any

from specverify.reference.architecture import Architecture
from specverify.reference.family.settings import PartialRotary
from specverify.reference.files.fields import Fields
from specverify.reference.oracle.family.base import (
    NULLABLE,
    STATED_HEADS,
    WHOLE_ROTARY,
    OracleFamily,
    Place,
    partial_rotary,
    rope_dictionary,
    window_for_all,
)
from specverify.reference.oracle.formulas import rotary
from specverify.reference.oracle.formulas.layer import Formulas
from specverify.reference.trace import Array


def _rows(name: str, shape: tuple[int, ...], first: int, last: int) -> Place:
    """The rows `first` to `last` of the stored tensor `name`."""
    return Place(name, shape, lambda values: values[first:last])


def _gate_up(arch: Architecture, name: str, shape: tuple[int, ...]) -> Place:
    inner = arch.intermediate_size
    for part, first in (("gate_proj", 0), ("up_proj", inner)):
        if name.endswith(f".{part}.weight"):
            return _rows(name.replace(part, "gate_up_proj"), (2 * inner, shape[1]), first, first + inner)
    return Place(name, shape)


def _qkv_or_gate_up(arch: Architecture, name: str, shape: tuple[int, ...]) -> Place:
    query_width, kv_width = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    for part, first, count in (
        ("q_proj", 0, query_width),
        ("k_proj", query_width, kv_width),
        ("v_proj", query_width + kv_width, kv_width),
    ):
        if name.endswith(f".{part}.weight"):
            return _rows(name.replace(part, "qkv_proj"), (query_width + 2 * kv_width, shape[1]), first, first + count)
    return _gate_up(arch, name, shape)


def _phi3_rope(fields: Fields) -> Any:
    """The rope dictionary; older files call longrope `su` or `yarn`, as transformers reads them."""
    content = rope_dictionary(fields)
    if isinstance(content, dict):
        kind = content.get("rope_type", content.get("type", "default"))
        content = {**content, "rope_type": "longrope" if kind in ("su", "yarn") else kind}
        if content["rope_type"] not in ("default", "longrope"):
            raise fields.refuse("phi3 has default or longrope rotary embedding; correct rope_type")
    return content


def _phi3(fields: Fields) -> dict[str, Any]:
    fields.integer("original_max_position_embeddings")
    return {"settings": PartialRotary(partial_rotary(fields))}


PHI3 = OracleFamily(
    "phi3",
    model_types=("phi3",),
    defaults={
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "num_attention_heads": 32,
        "rms_norm_eps": 1e-5,
    },
    slides=window_for_all,
    fields=_phi3,
    place=_qkv_or_gate_up,
    partial_rotary=True,
    rope=_phi3_rope,
    nullable=NULLABLE - {"partial_rotary_factor"},
)


def _rotate(arch: Architecture, x: Array, cos: Array, sin: Array) -> Array:
    return rotary.turn_neighbours(x, cos, sin)


def _glm4(fields: Fields) -> dict[str, Any]:
    settings = PartialRotary(partial_rotary(fields, 0.5))
    return {"qkv_bias": fields.flag("attention_bias", True), "settings": settings}


GLM4 = OracleFamily(
    "glm4",
    Formulas(rotate=_rotate),
    model_types=("glm4",),
    defaults={
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-07,
    },
    fields=_glm4,
    place=_gate_up,
    partial_rotary=True,
    nullable=STATED_HEADS,
    nulls=WHOLE_ROTARY,
)
