"""The layouts `static`, `overwrite` and `scratch`, with one pre-allocated buffer per layer.

- `static` writes rows in place; attention reads the buffer from end to end under a mask.
- `overwrite` writes columns [pos, pos + rows) in place, and the commit moves the logical position on. This is sound
  only if the cache is updated before attention reads it, because stale rows of a rejected block lie where the next
  block is written (ExecuTorch's plan for EAGLE-3). `updated_before_read` tests this for an attention path, and the
  engine refuses the layout if the test fails.
- `scratch` has a separate buffer for speculative rows, from which the commit copies the accepted ones.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from specverify.backends.engine.kv.base import (
    CacheSpec,
    KvCache,
    Pair,
    Poison,
    is_in_order,
    pick_columns,
    poison_of_width,
)


class Buffered:
    """Buffers of `capacity` columns, of which the first `length` are committed: column c is cell c.

    The tensors never change their address, which captured graphs require (vLLM and ExecuTorch keep such caches).
    """

    def __init__(self, room: CacheSpec) -> None:
        self.buffers = [room.empty(room.capacity, layer) for layer in range(room.layers)]
        self.layers = room.layers
        self.latent = room.latent
        self.index_widths = room.index_widths
        self.codec = room.codec
        self.length = 0
        self.rows = 0
        self.most_rows = 0
        self._last = 0

    def open(self, rows: int) -> None:
        """Count `rows` further rows as open; they follow the rows that are open already."""
        self.rows += rows
        self._last = rows

    def first(self, layer: int) -> int:
        """0: this layout keeps every column."""
        return 0

    def crop(self, length: int) -> None:
        """See `KvCache.crop`."""
        self.length = length
        self.rows = 0

    def begin_as(self, source: KvCache) -> None:
        """See `KvCache.begin_as`."""
        for layer, pair in enumerate(self.buffers):
            for buffer, columns in zip(pair, source.committed_columns(layer)[1:], strict=True):
                buffer[..., : source.length, :] = columns
        self.length = source.length

    def committed_columns(self, layer: int) -> tuple[int, Tensor, Tensor]:
        """All committed columns, from column 0; see `KvCache.committed_columns`."""
        keys, values = self.buffers[layer]
        return 0, keys[..., : self.length, :].clone(), values[..., : self.length, :].clone()

    def release(self) -> None:
        """See `KvCache.release`."""
        self.crop(0)


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
                buffer[..., self.length + self.rows :, :] = poison_of_width(number, buffer, self.codec)


class Overwrite(Static):
    """A static buffer; attention reads the columns in use, and a commit of rows that are in order moves no row."""

    def read(self, layer: int) -> Pair:
        """Committed columns and open rows, without the cells after them."""
        keys, values = self.buffers[layer]
        end = self.length + self.rows
        return keys[..., :end, :], values[..., :end, :]

    def cell_mask(self, layer: int, visible: torch.Tensor) -> torch.Tensor:
        """`visible` unchanged: `read` returns the logical columns in order."""
        return visible

    def commit(self, path: list[int]) -> str | None:
        """Move the logical position on; accepted rows that are out of order are moved first, with a reason returned."""
        if is_in_order(path):
            self._advance(len(path))
            return None
        super().commit(path)
        return "the accepted path is not a prefix of the row order: its rows were moved"


def updated_before_read(
    forward: Callable[[Overwrite], torch.Tensor],
    room: CacheSpec,
    committed: int,
    stale: tuple[float, float] = (3.0, -5.0),
) -> bool:
    """Whether a verify forward returns the same bits for two different fillings of the columns that it writes.

    `forward` commits `committed` columns to the cache that it is given, then runs one verify forward, and returns the
    logits of that forward. The cells after the committed columns hold the numbers of `stale`, one per run.
    """
    outputs = []
    for number in stale:
        cache = Overwrite(room)
        for pair in cache.buffers:
            for buffer in pair:
                buffer[..., committed:, :] = number
        outputs.append(forward(cache))
        if cache.length != committed:
            raise ValueError(f"the forward committed {cache.length} columns, not {committed}")
    return torch.equal(*outputs)


class Scratch(Buffered):
    """A committed buffer that no forward writes, and a scratch buffer for the rows of one block."""

    def __init__(self, room: CacheSpec) -> None:
        super().__init__(room)
        self.scratch = [room.empty(room.rows, layer) for layer in range(room.layers)]
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
                buffer[..., self.length :, :] = poison_of_width(number, buffer, self.codec)
            for buffer in rows:
                buffer[..., self.rows :, :] = poison_of_width(number, buffer, self.codec)
