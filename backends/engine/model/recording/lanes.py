"""The KV caches of a batch in a recorded forward.

A replay runs no Python, so tensors say where rows are written and which cells are read. The caller refills these
tensors before each replay, and one recording then serves later steps, and other requests in the same pool.
"""

import torch
from torch import Tensor

from specverify.backends.engine.columns import Paging
from specverify.backends.engine.kv.base import KvCache, Pair
from specverify.backends.engine.kv.contiguous import Overwrite, Static
from specverify.backends.engine.kv.lanes import BatchCache
from specverify.backends.engine.kv.paged import Paged, Pool

REFUSAL = "not captured: only static buffers and pages of one pool, without left padding, keep their addresses"


class RecordedLanes(BatchCache):
    """A batch of static caches whose rows are written to the columns in the tensors `slots`.

    Attributes:
        places: The tensors that a caller refills: for each lane `slots`, int64 [rows], the columns to which its rows
            are written.
    """

    def __init__(self, caches: list[KvCache], rows: list[int], filler: float = 0.0) -> None:
        super().__init__(caches, rows, filler)
        self.places: dict[str, Tensor] = {}

    @property
    def owners(self) -> list[Static] | list[Pool]:
        """The owner of each lane's cells; a recording is of no use when an owner ceases to exist."""
        return [cache for cache in self.caches if isinstance(cache, Static)]

    @property
    def addresses(self) -> tuple[int, ...]:
        """The address of each lane's first cells, which no other living cache or pool has."""
        return tuple(cache.buffers[0][0].data_ptr() for cache in self.caches if isinstance(cache, Static))

    @property
    def widths(self) -> tuple[int, ...]:
        """The number of columns that are read for each lane, if the addresses do not tell it."""
        return ()

    def current_places(self) -> dict[str, Tensor]:
        """The places of this forward, by name."""
        caches = [cache for cache in self.caches if isinstance(cache, Static)]
        return {
            # A level of a draft follows the open rows of the levels above it.
            f"slots {lane}": torch.arange(
                cache.length + cache.rows - num_rows, cache.length + cache.rows, device=cache.buffers[0][0].device
            )
            for lane, (cache, num_rows) in enumerate(zip(caches, self.rows, strict=True))
        }

    def widen_mask(self, mask: Tensor) -> Tensor:
        """The mask [B, 1, T, C] of this forward over the columns that the recording reads."""
        return mask

    def _write(self, lane: int, layer: int, keys: Tensor, values: Tensor) -> None:
        cache = self.caches[lane]
        assert isinstance(cache, Static)
        for buffer, rows in zip(cache.buffers[layer], (keys, values), strict=True):
            buffer.index_copy_(-2, self.places[f"slots {lane}"], rows)


class RecordedPages(RecordedLanes):
    """A batch of paged caches in one pool, read through block tables that are tensors.

    Where the layout promises the bits of a branch cache, exactly the columns of a lane are read, and each number of
    columns needs another recording. Elsewhere the number of pages is rounded up to a power of two. The mask hides the
    columns behind the end of a lane, and zeros replace their cells, since free cells may hold NaN and 0 * NaN is NaN.

    Attributes:
        pool: The pool of all lanes.
        places: For each lane `slots`, int64 [rows], the cells (page * size + offset) of its rows; `table`, int64
            [pages], its block table, which repeats its last page up to the rounded number; `length`, int64 [], its
            columns.
    """

    def __init__(self, caches: list[Paged], rows: list[int], filler: float = 0.0) -> None:
        super().__init__([*caches], rows, filler)
        self.pool = caches[0].pool
        self.paged = caches
        self._columns = [cache.length + cache.rows for cache in caches]
        used = [-(-columns // cache.blocks.size) for columns, cache in zip(self._columns, caches, strict=True)]
        self._used = used
        exact = caches[0].blocks.pages.exact
        self._counts = used if exact else [1 << (count - 1).bit_length() for count in used]
        self._widths = self._columns if exact else [count * caches[0].blocks.size for count in self._counts]

    @property
    def owners(self) -> list[Static] | list[Pool]:
        """See `RecordedLanes`."""
        return [self.pool]

    @property
    def addresses(self) -> tuple[int, ...]:
        """The address of the pool, once for each lane."""
        return (self.pool.layers[0][0].data_ptr(),) * len(self.paged)

    @property
    def widths(self) -> tuple[int, ...]:
        """See `RecordedLanes`."""
        return tuple(self._widths)

    def current_places(self) -> dict[str, Tensor]:
        """See `RecordedLanes`."""
        device = self.pool.layers[0][0].device
        places = {}
        for lane, cache in enumerate(self.paged):
            live = cache.blocks.table[: self._used[lane]]
            padded = live + live[-1:] * (self._counts[lane] - len(live))
            places[f"slots {lane}"] = cache.slots(self._columns[lane] - self.rows[lane], self._columns[lane])
            places[f"table {lane}"] = torch.tensor(padded, dtype=torch.long, device=device)
            places[f"length {lane}"] = torch.tensor(self._columns[lane], device=device)
        return places

    def widen_mask(self, mask: Tensor) -> Tensor:
        """See `RecordedLanes`; the columns of padding rows lie behind those that are read."""
        ends = [width + self.width - rows for width, rows in zip(self._widths, self.rows, strict=True)]
        wide_mask = mask.new_zeros((*mask.shape[:-1], max(ends)))
        for lane, (columns, width, end) in enumerate(zip(self._columns, self._widths, ends, strict=True)):
            wide_mask[lane, ..., :columns] = mask[lane, ..., :columns]
            wide_mask[lane, ..., width:end] = mask[lane, ..., columns : columns + end - width]
        return wide_mask

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object) -> Pair:
        """See `BatchCache`; columns are gathered through the tensors."""
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for lane, rows in enumerate(self.rows):
            self._write(lane, layer_idx, key_states[lane, :, :rows], value_states[lane, :, :rows])
            for lanes_read, cells, new_rows in zip(
                (keys, values), self.pool.layers[layer_idx], (key_states, value_states), strict=True
            ):
                lane_columns = self._gathered(lane, cells)
                lanes_read.append(
                    torch.cat([lane_columns, new_rows[lane, :, rows:]], 1) if rows < self.width else lane_columns
                )
        return self._stack(keys), self._stack(values)

    def _gathered(self, lane: int, cells: Tensor) -> Tensor:
        """The columns of a lane, [kv_heads, width, D], with zeros behind its end."""
        columns = cells[self.places[f"table {lane}"]].flatten(0, 1)[: self._widths[lane]].transpose(0, 1)
        beyond_end = torch.arange(self._widths[lane], device=cells.device) >= self.places[f"length {lane}"]
        return columns.masked_fill(beyond_end[None, :, None], 0.0).contiguous()

    def _write(self, lane: int, layer: int, keys: Tensor, values: Tensor) -> None:
        for cells, rows in zip(self.pool.layers[layer], (keys, values), strict=True):
            cells.flatten(0, 1).index_copy_(0, self.places[f"slots {lane}"], rows.transpose(0, 1))

    def _paging(self, layer: int) -> Paging | None:
        """None: a table in Python's numbers would be frozen in the recording."""
        return None


def recorded_lanes(batch: BatchCache) -> RecordedLanes | None:
    """The lanes of a recorded forward over a batch; None if attention reads other tensors in every step."""
    if type(batch) is not BatchCache:  # lanes padded on the left, say, hold other columns than their caches
        return None
    caches = batch.caches
    rows = batch.rows
    filler = batch.filler
    if all(isinstance(cache, Static) and not isinstance(cache, Overwrite) for cache in caches):
        return RecordedLanes(caches, rows, filler)
    # A cache of another class may write and read in another way, which the tensors would pass over.
    paged = [cache for cache in caches if type(cache) is Paged]
    if len(paged) == len(caches) and all(cache.pool is paged[0].pool for cache in paged):
        return RecordedPages(paged, rows, filler)
    return None
