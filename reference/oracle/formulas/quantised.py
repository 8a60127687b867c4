"""Quantised weights as numbers.

The rule is that of `specverify.reference.quantisation.rows.QUANTISED`. Each number is rounded by arithmetic alone, in
float64, where an e4m3 number and its step are exact.
"""

import numpy as np

from specverify.reference.quantisation.rows import QUANTISED
from specverify.reference.trace import Array

QUANTISED_NAMES = ("_proj.weight", "fc.weight", ".linear.weight")
"""The ends of the names of quantised matrices: projections, and the two kinds of matrices that only heads have."""


def quantised_weights(weight: Array, kind: str) -> Array:
    """The products number * scale that stand for `weight` [out, in], exact in float64."""
    weight32 = weight.astype(np.float32)
    largest = np.abs(weight32).max(axis=1, keepdims=True)
    scale = np.where(largest == 0, np.float32(1), largest / np.float32(QUANTISED[kind]))
    numbers = (weight32 / scale).astype(np.float64)
    rounded = np.rint(numbers) if kind == "int8" else nearest_e4m3(numbers)
    products: Array = rounded * scale.astype(np.float64)
    return products


def nearest_e4m3(values: Array) -> Array:
    """Each value, of at most 448, as the nearest 8-bit float with 4 bits of exponent and 3 of mantissa, ties to even.

    >>> nearest_e4m3(np.array([17.0, 19.0, 448.0, 0.001])).tolist()
    [16.0, 20.0, 448.0, 0.001953125]
    """
    # 2**exponent <= |value| < 2**(exponent + 1); below the smallest normal number 2**-6 the step stays.
    exponent = np.maximum(np.frexp(values)[1] - 1, -6)
    step = np.ldexp(1.0, exponent - 3)
    nearest: Array = np.rint(values / step) * step
    return nearest
