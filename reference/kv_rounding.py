"""KvRounding: the numbers to which a target's cache rounds keys and values, and their scales.

A stored number is a code times a scale. The scale is one of the case, or follows from the row alone: a row is then
rounded alike in every layout and batch, whatever stands beside it.
"""

from dataclasses import dataclass

LARGEST = {"fp8_e4m3": 448.0, "int8": 127.0}
"""The largest code of each dtype. `fp8_e4m3` has 4 bits of exponent and 3 of mantissa, and no infinity (OCP OFP8)."""

STATIC = ("tensor", "head")
"""Scales that the case has: one for the keys and one for the values of a layer, or of each of its KV heads."""

DYNAMIC = ("row", "block")
"""Scales by the largest number of a row's head, or of each BLOCK numbers of it (llama.cpp's q8_0 has blocks of 32)."""

BLOCK = 4
"""Numbers of a head that share a scale of `block`; the last block of a head may have fewer."""

EIGHTHS = 8
"""Static scales are multiples of an eighth of the case's scale."""

VALUES = 1.5
"""The static scale of values over that of keys."""


@dataclass(frozen=True)
class KvRounding:
    """The rounding of a target's keys and values.

    Attributes:
        dtype: The dtype of codes, a key of LARGEST.
        scales: A member of STATIC or DYNAMIC.
        scale: The least static scale; without effect on dynamic ones.
    """

    dtype: str
    scales: str
    scale: float

    @property
    def largest(self) -> float:
        """The largest code."""
        return LARGEST[self.dtype]

    @property
    def is_static(self) -> bool:
        """Whether the case has the scales, whatever the rows."""
        return self.scales in STATIC

    def static_scales(self, layer: int, kv_heads: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The scales of keys and of values of `layer`, one of each for every KV head.

        Those of neighbouring layers differ, and of neighbouring heads where each has its own; all have few enough bits
        for every working dtype.

        >>> KvRounding("int8", "head", 1.0).static_scales(1, 2)
        ((1.375, 1.0), (2.0625, 1.5))
        """
        heads = range(kv_heads) if self.scales == "head" else (0,) * kv_heads
        keys = tuple(self.scale * (EIGHTHS + (3 * layer + 5 * head) % EIGHTHS) / EIGHTHS for head in heads)
        return keys, tuple(VALUES * scale for scale in keys)
