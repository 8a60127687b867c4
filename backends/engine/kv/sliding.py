"""Sliding: a layer with a window or chunks keeps a ring of what it can still see; other layers keep everything."""

import torch
from torch import Tensor

from backends.engine.kv.base import KvCache, Pair, Room, picked


class Sliding:
    """Rings and full buffers, by layer.

    A ring has cells for the window or chunk and for one block: column c lies in cell c modulo the ring's size, and a
    block of at most `room.rows` rows never overwrites a column that a row of it, or of the next block, may still see.
    A ring of the window's size alone cannot be rewound (mlx-lm issue 1423).
    """

    def __init__(self, room: Room) -> None:
        spans = [reach.span for reach in room.reaches]
        sizes = [min(room.capacity, span - 1 + room.rows) if span else room.capacity for span in spans]
        self._reaches = room.reaches
        self.buffers = [room.empty(size) for size in sizes]
        self.layers = room.layers
        self.length = 0
        self.rows = 0
        self.most_rows = room.rows if any(spans) else 0
        self._last = 0

    def first(self, layer: int) -> int:
        """The first committed column that layer `layer` holds: no row to come can see one before it."""
        return self._reaches[layer].first(self.length)

    def _cells(self, layer: int, begin: int, end: int) -> Tensor:
        """Cells of the logical columns `begin` to `end`."""
        buffer = self.buffers[layer][0]
        return torch.arange(begin, end, device=buffer.device) % buffer.shape[-2]

    def _taken(self, layer: int, begin: int, end: int) -> Pair:
        keys, values = self.buffers[layer]
        cells = self._cells(layer, begin, end)
        return keys.index_select(-2, cells), values.index_select(-2, cells)

    def _put(self, layer: int, begin: int, pair: Pair) -> None:
        cells = self._cells(layer, begin, begin + pair[0].shape[-2])
        for buffer, new in zip(self.buffers[layer], pair, strict=True):
            buffer.index_copy_(-2, cells, new)

    def open(self, rows: int) -> None:
        """Rows follow the committed columns round the ring."""
        self.rows += rows
        self._last = rows

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write after the rows that were open before."""
        self._put(layer, self.length + self.rows - self._last, (keys, values))

    def read(self, layer: int) -> Pair:
        """The columns that are held, then the open rows."""
        return self._taken(layer, self.first(layer), self.length + self.rows)

    def shown(self, layer: int, visible: Tensor) -> Tensor:
        """Without the columns that are gone; none of them is visible."""
        return visible[..., self.first(layer) :]

    def block(self, layer: int) -> Pair:
        """See `KvCache.block`."""
        return self._taken(layer, self.length, self.length + self.rows)

    def amend(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """See `KvCache.amend`."""
        self._put(layer, self.length, (keys, values))

    def commit(self, path: list[int]) -> str | None:
        """Move the accepted rows up; the ring turns, and what is out of reach is overwritten later."""
        for layer in range(len(self.buffers)):
            self._put(layer, self.length, picked(self.block(layer), path))
        self.length, self.rows = self.length + len(path), 0
        return None

    def crop(self, length: int) -> None:
        """See `KvCache.crop`.

        Raises:
            ValueError: where a ring has already overwritten a column that a row at `length` would see.
        """
        for layer, (keys, _) in enumerate(self.buffers):
            reach, size = self._reaches[layer], keys.shape[-2]
            if reach.span and length and reach.first(length) < self.length + self.rows - size:
                raise ValueError(f"layer {layer}: a ring of {size} cells cannot be rewound to {length} columns")
        self.length, self.rows = length, 0

    def begin_as(self, other: KvCache) -> None:
        """See `KvCache.begin_as`."""
        self.length = other.length
        for layer in range(len(self.buffers)):
            first, keys, values = other.held(layer)
            self._put(layer, first, (keys, values))

    def held(self, layer: int) -> tuple[int, Tensor, Tensor]:
        """Committed columns from the first that is still held."""
        return self.first(layer), *self._taken(layer, self.first(layer), self.length)

    def poison(self, number: float) -> None:
        """Fill every cell that no held column and no open row lies in."""
        for layer, pair in enumerate(self.buffers):
            free = torch.ones(pair[0].shape[-2], dtype=torch.bool)
            free[self._cells(layer, self.first(layer), self.length + self.rows).cpu()] = False
            for buffer in pair:
                buffer[..., free.to(buffer.device), :] = number

    def release(self) -> None:
        """See `KvCache.release`."""
        self.length, self.rows = 0, 0
