"""Seeded weights of built-in models, and the weights of draft heads.

The oracle and the engines share these tensors. Seeded ones are exact in every working dtype.
"""

from specverify.reference.weights.heads import head_weights, seeded_head
from specverify.reference.weights.models import (
    PROBE_CODES,
    permutation,
    probe_architecture,
    representable,
    seeded_weights,
    shapes,
)

__all__ = [
    "PROBE_CODES",
    "head_weights",
    "permutation",
    "probe_architecture",
    "representable",
    "seeded_head",
    "seeded_weights",
    "shapes",
]
