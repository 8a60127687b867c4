"""Faults of paged writes: slot numbers, and the pages reserved for new rows."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specverify.backends.engine.kv.base import KvCache, is_in_order, pick_columns
from specverify.backends.engine.kv.lanes import BatchCache
from specverify.backends.engine.kv.paged import Paged
from specverify.backends.engine.kv.pages import Blocks
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.cache.contiguous_layouts import Commit, in_target_commit
from specverify.backends.faults.fault import attended_fault, committed_fault, in_place_of


@attended_fault(
    "slots-of-equal-rows",
    "catalogue BZ-047: decode slot mapping assumes the same number of tokens per request",
    "two requests in a batch, the first with fewer rows than another",
)
@in_place_of("kv.lanes")
class Uniform(BatchCache):
    """Rows are written to slots as if every request of the batch had as many of them."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """Take the rows of lane b from index b * width on, among the packed rows of all lanes."""
        return super().update(self._read_as_rectangle(key_states), self._read_as_rectangle(value_states), layer_idx)

    def _read_as_rectangle(self, states: Tensor) -> Tensor:
        packed_rows = torch.cat([lane_states[:, :rows] for lane_states, rows in zip(states, self.rows, strict=True)], 1)
        moved_states = states.clone()
        for lane, rows in enumerate(self.rows):
            index = lane * self.width + torch.arange(rows, device=states.device)
            # Clamped, so that a wrong slot reads a wrong row and raises no index error.
            moved_states[lane, :, :rows] = packed_rows[:, index.clamp(max=packed_rows.shape[1] - 1)]
        return moved_states


class Contiguous(Paged):
    """A paged cache that writes a verify block to consecutive slots."""

    verifying = False

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write from the first row's slot on, ignoring the block table's next page."""
        if not self.verifying:
            super().write(layer, keys, values)
            return
        begin = int(self.slots(self.length, self.length + 1)[0])
        for cells, new in zip(self.pool.layers[layer], (keys, values), strict=True):
            flat = cells.flatten(0, 1)
            # Rows behind the pool's last cell are lost.
            room = min(new.shape[-2], len(flat) - begin)
            flat[begin : begin + room] = new[..., :room, :].transpose(0, 1)


@attended_fault(
    "block-written-to-next-in-memory",
    "family of catalogue BZ-061: token slots that ignore the page layout",
    "a block that crosses a page's end, and pages out of order",
)
def contiguous_slots(seams: Seams) -> Seams:
    """A block that crosses a page's end goes on in the page that lies next in memory.

    Only verify forwards are affected; a prefill writes to its right slots.
    """

    class MarkingLanes(seams.kv.lanes):  # type: ignore[misc,name-defined]
        def __init__(self, caches: list[KvCache], rows: list[int], filler: float = 0.0) -> None:
            super().__init__(caches, rows, filler)
            for cache in caches:
                if isinstance(cache, Contiguous):
                    cache.verifying = True

    return replace(seams, kv=replace(seams.kv, paged=Contiguous, lanes=MarkingLanes))


class BlocksBehindCommit(Blocks):
    """A block table that reserves pages without counting the columns of the last commit."""

    pending = 0

    def reserve(self, columns: int) -> None:
        """Reserve as the host would whose view is one round behind."""
        super().reserve(columns - self.pending)

    def copy_on_write(self, begin: int, end: int) -> None:
        """Own the pages that the table has, which may be too few."""
        super().copy_on_write(begin, min(end, self.allocated))


@attended_fault(
    "reserved-one-round-behind",
    "catalogue BZ-083: device writes run ahead of host-allocated KV capacity",
    "a block accepted to the end, then one that crosses into a page that was not reserved",
)
def reserved_one_round_behind(seams: Seams) -> Seams:
    """Pages are reserved as if the last block were not accepted yet, and the next one runs past the block table."""

    def commit(cache: KvCache, path: list[int]) -> str | None:
        why = seams.commit(cache, path)
        if isinstance(cache, Paged) and isinstance(cache.blocks, BlocksBehindCommit):
            cache.blocks.pending = len(path)
        return why

    return replace(seams, commit=commit, kv=replace(seams.kv, blocks=BlocksBehindCommit))


@committed_fault(
    "values-moved-by-token-number",
    "catalogue BZ-061: accepted-token move of an auxiliary per-token cache ignores page layout",
    "pages out of order, and an accepted path that is not a prefix of the row order",
)
@in_target_commit("kv.paged")
class Apart(Paged):
    """Accepted keys are moved through the block table, the buffer beside them by token numbers.

    The buffer of values plays the part of the report's auxiliary per-token cache.
    """

    def commit_target(self, commit: Commit, path: list[int]) -> str | None:
        """Commit the rows `path`; a token's number is taken for its slot in the buffer of values."""
        if is_in_order(path):
            return commit(self, path)
        for layer, (_, cells) in enumerate(self.pool.layers):
            block = self.block(layer)
            keys, values = pick_columns(block, path)
            self.put(layer, self.length, (keys, block[1][..., : len(path), :]))
            flat = cells.flatten(0, 1)
            # Rows behind the buffer's last cell are lost.
            room = max(0, min(len(path), len(flat) - self.length))
            flat[self.length : self.length + room] = values[..., :room, :].transpose(0, 1)
        self.length = self.length + len(path)
        self.rows = 0
        return None
