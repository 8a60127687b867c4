"""The sliding layout, with a ring buffer for each layer of limited reach.

A layer with a window or chunks keeps only the columns that a later row can still see. Other layers keep every column.
"""

import torch
from torch import Tensor

from specverify.backends.engine.kv.base import CacheSpec, KvCache, Pair, Poison, pick_columns, poison_of_width
from specverify.backends.engine.uploads import upload


class Sliding:
    """A ring or a full buffer for each layer.

    A ring has cells for the window or chunk and for one block. Column c lies in cell c modulo the ring's size. A block
    of at most `room.rows` rows never overwrites a column that a row of this block, or of the next, may still see. A
    ring of the window's size alone cannot be rewound (mlx-lm issue 1423). This ring can always be rewound by one
    column, so that the last token may be fed again.
    """

    def __init__(self, room: CacheSpec) -> None:
        spans = [reach.span for reach in room.reaches]
        # A request never has more than `capacity` columns, so no ring needs more cells.
        sizes = [min(room.capacity, span + room.rows) if span else room.capacity for span in spans]
        self.reaches = room.reaches
        self.buffers = [room.empty(size, layer) for layer, size in enumerate(sizes)]
        self._intact = [0] * room.layers  # for each layer, the first column that no later write has overwritten
        self.layers = room.layers
        self.latent = room.latent
        self.index_widths = room.index_widths
        self.codec = room.codec
        self.length = 0
        self.rows = 0
        self.most_rows = room.rows if any(spans) else 0  # without a ring there is no limit
        self._last = 0

    def first(self, layer: int) -> int:
        """The first committed column that layer `layer` holds; no later row can see a column before it."""
        return self.reaches[layer].first(self.length)

    def _cells(self, layer: int, begin: int, end: int) -> Tensor:
        """The cells of the logical columns `begin` to `end`."""
        buffer = self.buffers[layer][0]
        # In a full buffer the remainder changes nothing: it has a cell for every column.
        return torch.arange(begin, end, device=buffer.device) % buffer.shape[-2]

    def _gather(self, layer: int, begin: int, end: int) -> Pair:
        keys, values = self.buffers[layer]
        cells = self._cells(layer, begin, end)
        return keys.index_select(-2, cells), values.index_select(-2, cells)

    def put(self, layer: int, begin: int, pair: Pair) -> None:
        """Write keys and values into the ring cells of columns `begin` on."""
        cells = self._cells(layer, begin, begin + pair[0].shape[-2])
        for buffer, rows in zip(self.buffers[layer], pair, strict=True):
            buffer.index_copy_(-2, cells, rows)
        size = self.buffers[layer][0].shape[-2]
        self._intact[layer] = max(self._intact[layer], begin + pair[0].shape[-2] - size)

    def open(self, rows: int) -> None:
        """Count `rows` further rows as open; they follow the committed columns round the ring.

        Raises:
            ValueError: if the rings have fewer cells than the open rows need.
        """
        if self.most_rows and self.rows + rows > self.most_rows:
            raise ValueError(f"{self.rows + rows} open rows in rings with cells for {self.most_rows}")
        self.rows += rows
        self._last = rows

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write after the rows that were open before."""
        self.put(layer, self.length + self.rows - self._last, (keys, values))

    def read(self, layer: int) -> Pair:
        """The committed columns that the layer still holds, then the open rows."""
        return self._gather(layer, self.first(layer), self.length + self.rows)

    def cell_mask(self, layer: int, visible: Tensor) -> Tensor:
        """`visible` without the columns that the layer no longer holds, none of which is visible."""
        return visible[..., self.first(layer) :]

    def block(self, layer: int) -> Pair:
        """See `KvCache.block`."""
        return self._gather(layer, self.length, self.length + self.rows)

    def amend(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """See `KvCache.amend`."""
        self.put(layer, self.length, (keys, values))

    def commit(self, path: list[int]) -> str | None:
        """Move the accepted rows up behind the committed columns; columns out of reach are overwritten later."""
        for layer in range(len(self.buffers)):
            self.put(layer, self.length, pick_columns(self.block(layer), path))
        self.length = self.length + len(path)
        self.rows = 0
        return None

    def crop(self, length: int) -> None:
        """See `KvCache.crop`.

        Raises:
            ValueError: if a ring has already overwritten a column that a row at `length` would see.
        """
        for layer, (reach, intact) in enumerate(zip(self.reaches, self._intact, strict=True)):
            first = reach.first(length)
            if first < min(length, intact):  # rejected rows have overwritten columns too
                raise ValueError(f"layer {layer}: a ring without column {first} cannot be rewound to {length} columns")
        self._intact = [min(length, intact) for intact in self._intact]
        self.length = length
        self.rows = 0

    def begin_as(self, source: KvCache) -> None:
        """See `KvCache.begin_as`."""
        self.length = source.length
        for layer in range(len(self.buffers)):
            first, keys, values = source.committed_columns(layer)
            self.put(layer, first, (keys, values))
            self._intact[layer] = first

    def committed_columns(self, layer: int) -> tuple[int, Tensor, Tensor]:
        """Committed columns from the first one that the layer still holds; see `KvCache.committed_columns`."""
        return self.first(layer), *self._gather(layer, self.first(layer), self.length)

    def poison(self, number: Poison) -> None:
        """Fill all cells but the open rows, the held columns, and the columns that a rewind by one token needs."""
        for layer, pair in enumerate(self.buffers):
            # One position back: a row at length - 1 may see one column more than the rows to come.
            first = self.reaches[layer].first(max(0, self.length - 1))
            self._intact[layer] = max(self._intact[layer], first)
            free = torch.ones(pair[0].shape[-2], dtype=torch.bool)
            free[self._cells(layer, first, self.length + self.rows).cpu()] = False
            places = free.nonzero()[:, 0]
            for buffer in pair:
                buffer[..., upload(places, buffer.device), :] = poison_of_width(number, buffer, self.codec)

    def release(self) -> None:
        """See `KvCache.release`."""
        self.crop(0)
