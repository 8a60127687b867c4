"""The scratch layout, with a separate buffer for speculative rows.

The commit copies the accepted rows from the scratch buffer into the committed buffer.
"""

import torch
from torch import Tensor

from specverify.backends.engine.kv.base import CacheSpec, Pair, Poison, pick_columns, poison_of_width
from specverify.backends.engine.kv.buffered import Buffered


class Scratch(Buffered):
    """A committed buffer that no forward writes, and a scratch buffer for the rows of one block."""

    def __init__(self, room: CacheSpec) -> None:
        super().__init__(room)
        self.scratch = [room.empty(room.rows) for _ in range(room.layers)]
        self.most_rows = room.rows

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write the rows into the scratch buffer."""
        for buffer, tensor in zip(self.scratch[layer], (keys, values), strict=True):
            buffer[..., self.rows - self._last : self.rows, :] = tensor

    def read(self, layer: int) -> Pair:
        """The committed columns, then the open rows of the scratch buffer."""
        committed = self.buffers[layer]
        rows = self.scratch[layer]
        keys, values = (
            torch.cat([committed_buffer[..., : self.length, :], scratch_buffer[..., : self.rows, :]], -2)
            for committed_buffer, scratch_buffer in zip(committed, rows, strict=True)
        )
        return keys, values

    def cell_mask(self, layer: int, visible: Tensor) -> Tensor:
        """`visible` unchanged: `read` returns the logical columns in order."""
        return visible

    def block(self, layer: int) -> Pair:
        """See `KvCache.block`."""
        keys, values = self.scratch[layer]
        return keys[..., : self.rows, :].clone(), values[..., : self.rows, :].clone()

    def amend(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """See `KvCache.amend`."""
        for buffer, tensor in zip(self.scratch[layer], (keys, values), strict=True):
            buffer[..., : self.rows, :] = tensor

    def commit(self, path: list[int]) -> str | None:
        """Copy the accepted rows behind the committed ones."""
        end = self.length + len(path)
        for committed, rows in zip(self.buffers, self.scratch, strict=True):
            for buffer, accepted_rows in zip(committed, pick_columns(rows, path), strict=True):
                buffer[..., self.length : end, :] = accepted_rows
        self.length = end
        self.rows = 0
        return None

    def poison(self, number: Poison) -> None:
        """Fill the free cells of both buffers."""
        for committed, rows in zip(self.buffers, self.scratch, strict=True):
            for buffer in committed:
                buffer[..., self.length :, :] = poison_of_width(number, buffer)
            for buffer in rows:
                buffer[..., self.rows :, :] = poison_of_width(number, buffer)
