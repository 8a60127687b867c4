"""The paged layout, after vLLM's PagedAttention.

Columns lie in pages of a pool that requests share. A block table says which page holds which columns.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specverify.backends.engine.kv.base import CacheSpec, Codec, KvCache, Pair, Poison, pick_columns, poison_of_width
from specverify.backends.engine.kv.pages import Blocks
from specverify.backends.engine.uploads import upload


class Cells:
    """The pages of something that every column has, such as keys and values.

    Attributes:
        layers: For each layer its tensors, [pages, size, ...] each.
        codec: What the cells hold in place of numbers (`CacheSpec.codec`).
    """

    layers: Sequence[tuple[Tensor, ...]]
    codec: Codec | None = None

    def copy(self, source: int, target: int) -> None:
        """Copy the page `source` to the page `target` in every layer."""
        for layer in self.layers:
            for cells in layer:
                cells[target] = cells[source]

    def fill(self, pages: list[int], number: Poison) -> None:
        """Write `number` into every cell of `pages`."""
        for layer in self.layers:
            for cells in layer:
                cells[upload(torch.tensor(pages, dtype=torch.long), cells.device)] = poison_of_width(
                    number, cells, self.codec
                )


class Pool(Cells):
    """The pages of one model: keys and values [pages, size, kv_heads, width] for each layer.

    Attributes:
        sources: For each layer the one whose columns it reads (`CacheSpec.source`).
    """

    layers: list[Pair]

    def __init__(self, room: CacheSpec, pages: int, size: int) -> None:
        self.latent = room.latent
        self.index_widths = room.index_widths
        self.codec = room.codec
        self.sources = [room.source(layer) for layer in range(room.layers)]
        self.layers = []
        for layer in range(room.layers):
            heads, widths, dtype = room.cells(layer)
            keys, values = (
                torch.zeros((pages, size, heads, width), dtype=dtype, device=room.device) for width in widths
            )
            self.layers.append((keys, values))


def slots_of(blocks: Blocks, begin: int, end: int, device: torch.device) -> Tensor:
    """The slots, page * size + offset, of the logical columns `begin` to `end` of a block table."""
    size = blocks.size
    slots = [blocks.table[column // size] * size + column % size for column in range(begin, end)]
    return upload(torch.tensor(slots, dtype=torch.long), device)


class Paged:
    """Columns of a request in `pool`, found through the block table `blocks`; the first `length` are committed."""

    def __init__(self, pool: Pool, blocks: Blocks, length: int = 0) -> None:
        self.pool = pool
        self.blocks = blocks
        self.layers = len(pool.layers)
        self.latent = pool.latent
        self.index_widths = pool.index_widths
        self.codec = pool.codec
        self.length = length
        self.rows = 0
        self.most_rows = 0
        self._last = 0
        # A copy on write must copy the page in the target's pool and in the draft's.
        blocks.copy.append(pool.copy)

    def slots(self, begin: int, end: int) -> Tensor:
        """The slots, page * size + offset, of the logical columns `begin` to `end`."""
        return slots_of(self.blocks, begin, end, self.pool.layers[0][0].device)

    def _gather(self, layer: int, begin: int, end: int) -> Pair:
        slots = self.slots(begin, end)
        keys, values = (cells.flatten(0, 1)[slots].transpose(0, 1) for cells in self.pool.layers[layer])
        # Contiguous per head like every other layout, since the bits of a product depend on strides.
        return keys.contiguous(), values.contiguous()

    def put(self, layer: int, begin: int, pair: Pair) -> None:
        """Write keys and values [kv_heads, rows, D] into the slots of columns `begin` on, through the block table."""
        slots = self.slots(begin, begin + pair[0].shape[-2])
        for cells, rows in zip(self.pool.layers[layer], pair, strict=True):
            cells.flatten(0, 1)[slots] = rows.transpose(0, 1)

    def open(self, rows: int) -> None:
        """Reserve pages for the rows, and replace shared pages that the rows will be written to by own copies."""
        begin = self.length + self.rows
        self.blocks.reserve(begin + rows)
        self.blocks.copy_on_write(begin, begin + rows)
        self.blocks.check()
        self.blocks.end = max(self.blocks.end, begin + rows)
        self.rows += rows
        self._last = rows

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write the rows opened last into their slots."""
        self.put(layer, self.length + self.rows - self._last, (keys, values))

    def read(self, layer: int) -> Pair:
        """Committed columns and open rows, gathered from their pages."""
        return self._gather(layer, 0, self.length + self.rows)

    def first(self, layer: int) -> int:
        """0: this layout keeps every column."""
        return 0

    def cell_mask(self, layer: int, visible: Tensor) -> Tensor:
        """`visible` unchanged: `read` returns the logical columns in order."""
        return visible

    def block(self, layer: int) -> Pair:
        """See `KvCache.block`."""
        return self._gather(layer, self.length, self.length + self.rows)

    def amend(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """See `KvCache.amend`."""
        self.put(layer, self.length, (keys, values))

    def commit(self, path: list[int]) -> str | None:
        """Move the accepted rows up behind the committed columns, within the request's own pages."""
        for layer in range(len(self.pool.layers)):
            # `block` and `pick_columns` copy, since source and destination may overlap.
            self.put(layer, self.length, pick_columns(self.block(layer), path))
        self.length = self.length + len(path)
        self.rows = 0
        return None

    def crop(self, length: int) -> None:
        """See `KvCache.crop`; pages stay allocated."""
        self.length = length
        self.rows = 0

    def begin_as(self, source: KvCache) -> None:
        """See `KvCache.begin_as`; the arena forks paged caches by sharing pages, without this copy."""
        self.blocks.reserve(source.length)
        for layer in range(len(self.pool.layers)):
            self.put(layer, 0, source.committed_columns(layer)[1:])
        self.length = source.length

    def committed_columns(self, layer: int) -> tuple[int, Tensor, Tensor]:
        """All committed columns, from column 0; see `KvCache.committed_columns`."""
        return 0, *self._gather(layer, 0, self.length)

    def poison(self, number: Poison) -> None:
        """Fill the cells after the open rows in pages that only this request holds; the arena fills free pages."""
        end = self.length + self.rows
        spare = [column for column in range(end, self.blocks.allocated) if self._is_sole_holder(column)]
        if spare:
            size = self.blocks.size
            slots = torch.tensor([self.blocks.table[column // size] * size + column % size for column in spare])
            for pair in self.pool.layers:
                for cells in pair:
                    cells.flatten(0, 1)[upload(slots, cells.device)] = poison_of_width(number, cells, self.codec)

    def _is_sole_holder(self, column: int) -> bool:
        return self.blocks.pages.holders[self.blocks.table[column // self.blocks.size]] == 1

    def release(self) -> None:
        """Give the block table's pages back."""
        self.blocks.release()
        self.length = self.rows = 0
