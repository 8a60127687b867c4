"""The static layout, with one pre-allocated buffer per layer.

Rows are written in place, and attention reads the buffer from end to end under a mask.
"""

import torch
from torch import Tensor

from specverify.backends.engine.kv.base import Pair, Poison, pick_columns, poison_of_width
from specverify.backends.engine.kv.buffered import Buffered


class Static(Buffered):
    """A cache whose open rows follow the committed columns in the same buffers."""

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write in place, after the rows that were open before."""
        end = self.length + self.rows
        for buffer, rows in zip(self.buffers[layer], (keys, values), strict=True):
            buffer[..., end - self._last : end, :] = rows

    def read(self, layer: int) -> Pair:
        """Every cell, including stale ones, which the mask hides."""
        return self.buffers[layer]

    def cell_mask(self, layer: int, visible: Tensor) -> Tensor:
        """`visible`, padded to the whole buffer with the cells after the open rows hidden."""
        spare = self.buffers[layer][0].shape[-2] - visible.shape[-1]
        return torch.nn.functional.pad(visible, (0, spare), value=False)

    def block(self, layer: int) -> Pair:
        """See `KvCache.block`."""
        keys, values = self.buffers[layer]
        rows = slice(self.length, self.length + self.rows)
        return keys[..., rows, :].clone(), values[..., rows, :].clone()

    def amend(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """See `KvCache.amend`."""
        for buffer, rows in zip(self.buffers[layer], (keys, values), strict=True):
            buffer[..., self.length : self.length + self.rows, :] = rows

    def commit(self, path: list[int]) -> str | None:
        """Move the accepted rows up behind the committed columns, from copies, since both ranges may overlap."""
        for layer in range(len(self.buffers)):
            accepted = pick_columns(self.block(layer), path)
            for buffer, rows in zip(self.buffers[layer], accepted, strict=True):
                buffer[..., self.length : self.length + len(path), :] = rows
        self._advance(len(path))
        return None

    def _advance(self, num_rows: int) -> None:
        self.length += num_rows
        self.rows = 0

    def poison(self, number: Poison) -> None:
        """Fill the cells after the open rows."""
        for pair in self.buffers:
            for buffer in pair:
                buffer[..., self.length + self.rows :, :] = poison_of_width(number, buffer)
