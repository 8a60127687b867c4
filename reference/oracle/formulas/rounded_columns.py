"""Rounded columns: keys and values as a cache of codes gives them back.

A number x with the scale s is read as s times the code nearest to x / s, the even one of two. A number beyond the
largest code has that one. An engine's numbers are not exact, so that a number near the border between two codes may
have either: the oracle takes the code that the engine shows, where the border is near enough.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from specverify.reference.kv_rounding import BLOCK, KvRounding
from specverify.reference.oracle.formulas.routers import UNKNOWN
from specverify.reference.trace import Array

SLACK = {"float64": 2.0**23, "float32": 512.0, "bfloat16": 16.0, "float16": 16.0}
"""How far beyond a code's border the oracle's number may lie for the engine to have that code.

It is counted in unit roundoffs times the root of the number of layers and the largest number of the row.
"""

ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Unit roundoff of each working dtype."""


def float8_numbers() -> Array:
    """The numbers of the 256 codes of float8_e4m3fn, NaN for the two that are none (OCP OFP8, section 5)."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    size = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    numbers: Array = np.where((codes & 127) == 127, np.nan, np.where(codes & 128, -size, size))
    return numbers


def int8_numbers() -> Array:
    """The numbers of the 256 bytes as int8; NaN for -128, which no number is rounded to."""
    numbers = np.arange(256.0)
    return np.where(numbers == 128, np.nan, np.where(numbers > 128, numbers - 256, numbers))


@dataclass(frozen=True)
class Grid:
    """The numbers of one dtype of codes.

    Attributes:
        numbers: All of them, each once, ascending: float64 [n].
        borders: The middles between neighbours, between two infinities: [n + 1].
        even: Whether a number is taken on its border: bool [n].
        of_code: The place of the number of each byte, or -1 for none: int [256].
        codes: The byte of each number: int [n].
    """

    numbers: Array
    borders: Array
    even: Array
    of_code: Array
    codes: Array

    def nearest(self, scaled: Array) -> Array:
        """The place of the number nearest to each of `scaled`, the even one of two; NaN has the place of 0."""
        places = np.searchsorted(self.borders[1:-1], scaled, side="left")
        # `left` gives the lower of two numbers on their border.
        is_upper = (places + 1 < len(self.numbers)) & (scaled == self.borders[places + 1]) & ~self.even[places]
        return np.where(np.isnan(scaled), len(self.numbers) // 2, places + is_upper)


@cache
def grid(dtype: str) -> Grid:
    """The grid of `KvRounding.dtype`."""
    of_codes = float8_numbers() if dtype == "fp8_e4m3" else int8_numbers()
    numbers = np.unique(of_codes[~np.isnan(of_codes)])
    middles = (numbers[1:] + numbers[:-1]) / 2
    zero = len(numbers) // 2
    places = np.searchsorted(numbers, np.where(np.isnan(of_codes), 0.0, of_codes))
    of_code = np.where(np.isnan(of_codes), -1, places)
    codes = np.zeros(len(numbers), dtype=np.int64)
    codes[of_code[::-1][of_code[::-1] >= 0]] = np.arange(255, -1, -1)[of_code[::-1] >= 0]  # +0 and not -0
    return Grid(
        numbers,
        np.concatenate([[-np.inf], middles, [np.inf]]),
        np.abs(np.arange(len(numbers)) - zero) % 2 == 0,
        of_code,
        codes,
    )


@dataclass(frozen=True)
class RoundedColumns:
    """How a target's keys and values are rounded.

    Attributes:
        rounding: The words of the case.
        dtype: The engine's working dtype.
        layers: Number of layers of the target.
        is_exact: Whether borders are asked at all: False where the codes are held fixed, whatever the numbers.
    """

    rounding: KvRounding
    dtype: str
    layers: int
    is_exact: bool = True

    def columns(
        self, layer: int, pair: tuple[Array, Array], positions: Array, known: Array | None
    ) -> tuple[Array, Array]:
        """Keys and values [kv_heads, T, width] of `layer` as they are read.

        Args:
            layer: The layer.
            pair: Keys and values before they are stored.
            positions: The position of each row, [T].
            known: The codes that an engine shows for each row, [T, codes], UNKNOWN where it shows none; or None.
        """
        keys, values = pair
        codes: tuple[Array | None, Array | None] = (None, None)
        count = keys.shape[0] * keys.shape[2]
        if known is not None and known.shape[1] >= count + values.shape[0] * values.shape[2]:
            codes = known[:, :count], known[:, count : count + values.shape[0] * values.shape[2]]
        return (
            self._rounded(layer, 0, keys, codes[0], positions),
            self._rounded(layer, 1, values, codes[1], positions),
        )

    def _rounded(self, layer: int, side: int, numbers: Array, codes: Array | None, positions: Array) -> Array:
        if not numbers.size:
            return numbers
        scales, codes_of = self.scales(layer, side, numbers), grid(self.rounding.dtype)
        scaled = numbers / scales
        places = codes_of.nearest(scaled)
        if codes is not None:
            shown = codes.reshape(numbers.shape[1], numbers.shape[0], -1).swapaxes(0, 1)
            shown_places = np.where(shown == UNKNOWN, -1, codes_of.of_code[shown & 255])
            beyond = np.maximum(codes_of.borders[shown_places] - scaled, scaled - codes_of.borders[shown_places + 1])
            is_near = beyond * scales <= self._slack(side, numbers, positions)
            places = np.where((shown_places >= 0) & is_near, shown_places, places)
        rounded: Array = codes_of.numbers[places] * scales
        return rounded

    def _slack(self, side: int, numbers: Array, positions: Array) -> Array | float:
        """How far from a code's borders numbers [kv_heads, T, width] may lie, [1, T, 1]."""
        if not self.is_exact:
            return np.inf
        largest = np.abs(numbers).max(axis=(0, 2), keepdims=True)
        slack = SLACK[self.dtype] * ROUNDOFF[self.dtype] * np.sqrt(self.layers) * largest
        # Angles of rotary embedding are off by up to two roundoffs of their table per position.
        table = min(ROUNDOFF[self.dtype], ROUNDOFF["float32"])
        slack = slack + (2 * table * positions[None, :, None] * largest if side == 0 else 0.0)
        granted: Array = np.maximum(slack, SLACK["float64"] * ROUNDOFF["float64"])
        return granted

    def scales(self, layer: int, side: int, numbers: Array) -> Array:
        """The scales beside keys (`side` 0) or values (1) [kv_heads, T, width], which they broadcast to."""
        if self.rounding.is_static:
            of_heads = self.rounding.static_scales(layer, len(numbers))[side]
            return np.array(of_heads)[:, None, None]
        width = numbers.shape[-1]
        block = BLOCK if self.rounding.scales == "block" else width
        peaks = np.maximum.reduceat(np.abs(numbers), np.arange(0, width, block), axis=-1)
        scales = np.where(peaks > 0, peaks / self.rounding.largest, 1.0)
        return np.repeat(scales, block, axis=-1)[..., :width]

    def codes(self, layer: int, keys: Array, values: Array) -> Array:
        """The codes of keys and values [kv_heads, T, width] that are rounded already: int [T, codes]."""
        sides = []
        for side, numbers in enumerate((keys, values)):
            codes_of = grid(self.rounding.dtype)
            places = (
                codes_of.nearest(numbers / self.scales(layer, side, numbers))
                if numbers.size
                else np.zeros(numbers.shape, int)
            )
            sides.append(codes_of.codes[places].swapaxes(0, 1).reshape(numbers.shape[1], -1))
        return np.concatenate(sides, axis=1)
