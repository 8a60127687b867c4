"""Hunyuan's dense model and Apertus, which norm queries and keys.

After transformers' `models/hunyuan_v1_dense` and `models/apertus`. Hunyuan norms queries and keys after rotary
embedding. Where that has the kind `dynamic` and a field `alpha`, one table serves all lengths, to the base
theta * alpha ** (d / (d - 2)). Apertus has no gate.
"""

from typing import Any

import numpy as np

from specverify.reference.architecture import Architecture
from specverify.reference.files.fields import Fields
from specverify.reference.oracle.family.base import OracleFamily, Place, biases_and_norms, rope_dictionary
from specverify.reference.oracle.formulas.layer import Formulas, State, linear
from specverify.reference.trace import Array


def _hunyuan_rope(fields: Fields) -> Any:
    content = rope_dictionary(fields)
    if not isinstance(content, dict) or not content.get("alpha"):
        return content
    if content.get("rope_type", content.get("type")) != "dynamic":
        raise fields.refuse("rope field alpha belongs to the kind dynamic; correct rope_type")
    rope_fields = Fields(fields.where, content, {})
    rope_fields.number("factor")  # transformers asks for it, and computes nothing with it
    width = fields.integer("head_dim")
    if width < 3 or rope_fields.number("alpha") <= 0:
        raise fields.refuse("rope field alpha makes no base of this head_dim; correct it")
    theta = rope_fields.number("rope_theta", fields.number("rope_theta", 10000.0))
    return {"rope_type": "default", "rope_theta": theta * rope_fields.number("alpha") ** (width / (width - 2))}


def _hunyuan_place(arch: Architecture, name: str, shape: tuple[int, ...]) -> Place:
    return Place(name.replace(".q_norm.", ".query_layernorm.").replace(".k_norm.", ".key_layernorm."), shape)


def _hunyuan(fields: Fields) -> dict[str, Any]:
    fields.integer("head_dim")  # transformers' class scales scores by it, and has no default
    return biases_and_norms(fields)


HUNYUAN = OracleFamily(
    "hunyuan_v1_dense",
    Formulas(norms_after_rotation=True),
    model_types=("hunyuan_v1_dense",),
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    fields=_hunyuan,
    place=_hunyuan_place,
    rope=_hunyuan_rope,
)


def _softplus(x: Array) -> Array:
    """ln(1 + exp(x)), without overflow."""
    logarithm: Array = np.logaddexp(0.0, x)
    return logarithm


def xielu(x: Array, state: State, prefix: str) -> Array:
    """The activation xIELU (arXiv 2411.13010) with the numbers of the block `prefix`."""
    beta, least = state[f"{prefix}.beta"], state[f"{prefix}.eps"]
    rising, falling = _softplus(state[f"{prefix}.alpha_p"]), beta + _softplus(state[f"{prefix}.alpha_n"])
    negative_part = (np.expm1(np.minimum(x, least)) - x) * falling
    bent: Array = np.where(x > 0, rising * x * x, negative_part) + beta * x
    return bent


def _ungated_block(arch: Architecture, state: State, layer: int, x: Array) -> Array:
    prefix = f"model.layers.{layer}.mlp"
    return linear(xielu(linear(x, state, f"{prefix}.up_proj"), state, f"{prefix}.act_fn"), state, f"{prefix}.down_proj")


def _apertus_rope(fields: Fields) -> Any:
    content = rope_dictionary(fields)
    if not content:
        raise fields.refuse("rope_parameters is missing; add it as the model's author published it")
    return content


APERTUS = OracleFamily(
    "apertus",
    Formulas(feed_forward=_ungated_block),
    model_types=("apertus",),
    defaults={"max_position_embeddings": 65536, "rms_norm_eps": 1e-5, "rope_theta": 12000000.0},
    activation=("hidden_act", "xielu"),
    fields=biases_and_norms,
    rope=_apertus_rope,
)
