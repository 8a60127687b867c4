"""Llama 4's text model with dense layers (transformers `models/llama4`).

Rotary embedding turns neighbouring dimensions together.
"""

import numpy as np

from reference.architecture import Architecture
from reference.oracle.family.base import OracleFamily
from reference.oracle.formulas import rotary
from reference.oracle.formulas.layer import Formulas, rms_norm
from reference.trace import Array


def _turned(arch: Architecture, x: Array, cos: Array, sin: Array) -> Array:
    """Queries or keys with neighbouring dimensions turned together, then normed without gain if the model has that."""
    turned = rotary.turn_neighbours(x, cos, sin)
    return rms_norm(turned, np.ones(arch.head_dim), arch.norm_eps) if arch.qk_norm else turned


LLAMA4 = OracleFamily("llama4", Formulas(turned=_turned))
