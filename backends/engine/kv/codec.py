"""KvCodec: keys and values as the codes and scales that a cache stores.

A cell of a row's head holds one byte per number, and behind them its scales, where these follow from the row. So every
copy of a cell moves both: a commit, a copy on write, a page that goes to the second tier, a hand-over.
"""

import torch
from torch import Tensor

from specverify.backends.engine.kv.base import CacheSpec, Pair
from specverify.reference.kv_rounding import BLOCK, KvRounding

CODES = {"fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}
"""The dtype of codes, by `KvRounding.dtype`."""

LEAST_EXPONENT, MANTISSA_BITS = -6, 3
"""Of float8_e4m3fn: the exponent of its least normal number, and the bits behind the leading one."""


class KvCodec:
    """Rounds the rows of a target's cache, and gives them back in the working dtype.

    Attributes:
        rounding: The rounding.
        room: The sizes of the cache's rows before they are rounded.
    """

    def __init__(self, rounding: KvRounding, room: CacheSpec) -> None:
        self.rounding = rounding
        self.room = room
        # Scales of float64 are as exact as the numbers; those of narrower dtypes are float32, as in vLLM.
        self.scale_dtype = torch.float64 if room.dtype == torch.float64 else torch.float32

    def widths(self, layer: int) -> tuple[int, int]:
        """The bytes of one head's cell of keys, and of values, in `layer`."""
        keys, values = self.room.sizes(layer)[1]
        return self.width_of_cell(keys), self.width_of_cell(values)

    def width_of_cell(self, width: int) -> int:
        """The bytes of a cell of `width` numbers."""
        scales = 0 if self.rounding.is_static else -(-width // self.block(width))
        return width + scales * self.scale_dtype.itemsize

    def block(self, width: int) -> int:
        """How many of `width` numbers share a scale that follows from them."""
        return BLOCK if self.rounding.scales == "block" else width

    def encode(self, layer: int, pair: Pair) -> Pair:
        """Keys and values [kv_heads, rows, width] as cells, uint8 [kv_heads, rows, bytes]."""
        keys, values = (self.encode_side(layer, side, numbers) for side, numbers in enumerate(pair))
        return keys, values

    def decode(self, layer: int, pair: Pair) -> Pair:
        """Cells of keys and values as numbers in the working dtype; `encode` undone."""
        keys, values = (self.decode_side(layer, side, cells) for side, cells in enumerate(pair))
        return keys, values

    def encode_side(self, layer: int, side: int, numbers: Tensor) -> Tensor:
        """The cells of keys (`side` 0) or values (1) of `layer`."""
        numbers = numbers.to(self.scale_dtype)
        if self.rounding.is_static:
            return self.codes_of(numbers / self.static_scales(layer, side, len(numbers)))
        scales = self.row_scales(numbers)
        codes = self.codes_of(numbers / self.spread(scales, numbers.shape[-1]))
        return torch.cat([codes, scales.contiguous().view(torch.uint8)], -1)

    def decode_side(self, layer: int, side: int, cells: Tensor) -> Tensor:
        """The numbers of cells of keys (`side` 0) or values (1) of `layer`."""
        width = self.room.sizes(layer)[1][side]
        codes = cells[..., :width].contiguous().view(CODES[self.rounding.dtype]).to(self.scale_dtype)
        if self.rounding.is_static:
            return (codes * self.static_scales(layer, side, len(codes))).to(self.room.dtype)
        scales = self.stored_scales(cells, width)
        return (codes * self.spread(scales, width)).to(self.room.dtype)

    def stored_scales(self, cells: Tensor, width: int) -> Tensor:
        """The scales behind the first `width` bytes of cells, [kv_heads, rows, scales]."""
        # A copy: bytes in the middle of others may not begin where a scale can.
        return cells[..., width:].clone(memory_format=torch.contiguous_format).view(self.scale_dtype)

    def static_scales(self, layer: int, side: int, kv_heads: int) -> Tensor:
        """The case's scales for keys or values of `layer`, [kv_heads, 1, 1]."""
        scales = self.rounding.static_scales(layer, kv_heads)[side]
        return torch.tensor(scales, dtype=self.scale_dtype, device=self.room.device)[:, None, None]

    def row_scales(self, numbers: Tensor) -> Tensor:
        """The scales by which the largest number of each block has the largest code, [kv_heads, rows, blocks].

        A block of zeros has the scale 1.
        """
        width = numbers.shape[-1]
        block = self.block(width)
        spare = -width % block
        padded = torch.nn.functional.pad(numbers.abs(), (0, spare))
        blocks = padded.reshape(*numbers.shape[:-1], padded.shape[-1] // block, block)
        scales = blocks.amax(-1) / self.rounding.largest
        return scales.masked_fill(scales == 0, 1.0)

    def spread(self, scales: Tensor, width: int) -> Tensor:
        """The scales [..., blocks] beside each of `width` numbers, [..., width]."""
        return scales.repeat_interleave(self.block(width), -1)[..., :width]

    def codes_of(self, scaled: Tensor) -> Tensor:
        """The nearest codes of scaled numbers, as bytes; a number beyond the largest code has that one."""
        scaled = self.saturated(scaled)
        if self.rounding.dtype == "int8":
            return scaled.nan_to_num(0.0).round().to(torch.int8).view(torch.uint8)
        return self.on_grid(scaled).to(torch.float8_e4m3fn).view(torch.uint8)

    def saturated(self, scaled: Tensor) -> Tensor:
        """Scaled numbers, none beyond the largest code."""
        return scaled.clamp(-self.rounding.largest, self.rounding.largest)

    def on_grid(self, scaled: Tensor) -> Tensor:
        """Scaled numbers rounded to float8_e4m3fn, still in their own dtype.

        torch casts float64 by way of float32, which rounds twice.
        """
        if scaled.dtype != torch.float64:
            return scaled
        exponent = torch.frexp(scaled)[1] - 1
        step = torch.ldexp(torch.ones_like(scaled), exponent.clamp(min=LEAST_EXPONENT) - MANTISSA_BITS)
        return (scaled / step).round() * step

    def shown_codes(self, layer: int, pair: Pair) -> Tensor:
        """The codes in cells of keys and values [kv_heads, rows, bytes], int64 [rows, numbers], head after head."""
        widths = self.room.sizes(layer)[1]
        sides = [cells[..., :width].transpose(0, 1).flatten(1) for cells, width in zip(pair, widths, strict=True)]
        return torch.cat(sides, -1).to(torch.int64)

    def poison(self, number: float | Tensor, width: int) -> Tensor:
        """A cell of `width` bytes that holds `number`, or a key that is repeated or cut, as far as codes can."""
        count = next(count for count in range(1, width + 1) if self.width_of_cell(count) == width)
        key = torch.tensor([number]) if isinstance(number, float) else number
        numbers = key.to(self.room.device, self.room.dtype)[torch.arange(count, device=self.room.device) % len(key)]
        return self.encode_side(0, 0, numbers[None, None])[0, 0]
