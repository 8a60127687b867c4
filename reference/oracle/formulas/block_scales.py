"""Weights in 8-bit floats with a factor for each block.

The rule is that of `specverify.reference.files.block_scales`.
"""

import numpy as np

from specverify.reference.trace import Array


def apply_scales(numbers: Array, factors: Array, block: tuple[int, int]) -> Array:
    """The weights of a matrix [out, in] with a factor for each block: exact in float64 where factors are float32."""
    rows, columns = (np.arange(count) // size for count, size in zip(numbers.shape, block, strict=True))
    weights: Array = numbers * factors[rows[:, None], columns]
    return weights


def factors_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """The shape of the factors of a matrix of this shape."""
    return tuple(-(-count // size) for count, size in zip(shape, block, strict=True))
