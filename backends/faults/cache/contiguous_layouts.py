"""Faults of KV layouts without pages: the commit of accepted rows."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specverify.backends.engine.kv.arena import Arena, CacheLease, CacheNeeds
from specverify.backends.engine.kv.base import KvCache, Pair, pick_columns
from specverify.backends.engine.kv.branch import Branch
from specverify.backends.engine.kv.contiguous import Scratch, Static
from specverify.backends.engine.kv.sliding import Sliding
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import Plant, committed_fault, in_place_of, with_seam

Commit = Callable[[KvCache, list[int]], str | None]


def in_target_commit(seam: str) -> Callable[[type[Any]], Plant]:
    """A decorator for a cache class at `seam` whose `commit_target` takes the place of a commit in the target's cache.

    The draft's cache is of the same class: what a fault does to the target alone, it does in the seam of its commit.
    """

    def decorate(kind: type[Any]) -> Plant:
        def plant(seams: Seams) -> Seams:
            def commit(cache: KvCache, path: list[int]) -> str | None:
                if not isinstance(cache, kind):
                    return seams.commit(cache, path)
                why: str | None = cache.commit_target(seams.commit, path)
                return why

            replaced: Seams = with_seam(seams, seam, kind)
            return replace(replaced, commit=commit)

        plant.__doc__ = kind.__doc__
        return plant

    return decorate


@committed_fault(
    "last-layer-not-moved",
    "family of catalogue BZ-061: one of several buffers is left out of the move",
    "an accepted path that is not a prefix of the row order",
)
@in_place_of("commit")
def last_layer_in_place(seams: Seams, cache: KvCache, path: list[int]) -> str | None:
    """Accepted rows are moved in all layers but the last, whose buffer is forgotten."""
    for layer in range(max(1, cache.layers - 1)):
        block = cache.block(layer)
        for cells, accepted_rows in zip(block, pick_columns(block, path), strict=True):
            cells[..., : len(path), :] = accepted_rows
        cache.amend(layer, *block)
    return seams.commit(cache, list(range(len(path))))


@committed_fault(
    "fast-reorder-without-offset",
    "family of catalogue BZ-133: one way of the commit has an index formula of its own",
    "commit by fast, over a prefix",
)
@in_target_commit("kv.branch")
class Fast(Branch):
    """The fast reorder takes rows by their index in the block, without the length of the prefix before them."""

    def commit_target(self, commit: Commit, path: list[int]) -> str | None:
        """Commit wrong rows where the accepted ones would be appended to the prefix where it lies."""
        if self.way_of(path)[0] == "fast":
            for layer in range(self.layers):
                block = self.block(layer)
                for cells, wrong_rows in zip(block, pick_columns(self.read(layer), path), strict=True):
                    cells[..., path, :] = wrong_rows
                self.amend(layer, *block)
        return commit(self, path)


@committed_fault(
    "scratch-committed-in-row-order",
    "family of catalogue BZ-132: compaction that presumes increasing rows",
    "layout scratch, and an accepted node whose row comes before its parent's",
)
@in_place_of("commit")
def scratch_in_row_order(seams: Seams, cache: KvCache, path: list[int]) -> str | None:
    """Accepted scratch rows are copied in the order of the rows, not in that of the path."""
    return seams.commit(cache, sorted(path) if isinstance(cache, Scratch) else path)


@committed_fault(
    "committed-at-flat-index",
    "catalogue BZ-153: committed token part wrong after the second tree verification",
    "layout scratch, and a step after one with a rejected row",
)
@in_target_commit("kv.scratch")
class Flat(Scratch):
    """From the second tree on, accepted rows are committed at their index among all rows, not at their depth.

    The first commit is right, because nothing was rejected before it.
    """

    rejected = 0

    def commit_target(self, commit: Commit, path: list[int]) -> None:
        """Copy the accepted rows, with as many columns of offset as rows were rejected before."""
        begin = self.length + self.rejected
        for buffers, rows in zip(self.buffers, self.scratch, strict=True):
            for buffer, new in zip(buffers, pick_columns(rows, path), strict=True):
                room = max(0, min(len(path), buffer.shape[-2] - begin))
                buffer[..., begin : begin + room, :] = new[..., :room, :]
        self.rejected += self.rows - len(path)
        self.length = self.length + len(path)
        self.rows = 0


@committed_fault(
    "crop-makes-new-tensors",
    "catalogue BZ-109: crop on StaticCache creates a new shorter cache",
    "layout static, and a step after one with a rejected row",
)
@in_target_commit("kv.static")
class CropsAnew(Static):
    """A crop of the static cache makes new tensors, while the forward goes on writing to the old ones.

    A captured forward keeps the tensors of its recording, here the old ones.
    """

    captured_buffers: list[Pair] | None = None

    def commit_target(self, commit: Commit, path: list[int]) -> str | None:
        """After a rejection copy the committed columns into new tensors, and keep the old ones as the captured ones."""
        has_rejected = self.rows > len(path)
        why = commit(self, path)
        if has_rejected:
            self.captured_buffers = self.captured_buffers or self.buffers
            fresh = [(torch.zeros_like(keys), torch.zeros_like(values)) for keys, values in self.buffers]
            for pair, old in zip(fresh, self.buffers, strict=True):
                for buffer, old_buffer in zip(pair, old, strict=True):
                    buffer[..., : self.length, :] = old_buffer[..., : self.length, :]
            self.buffers = fresh
        return why

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write into the captured tensors."""
        end = self.length + self.rows
        for buffer, new in zip((self.captured_buffers or self.buffers)[layer], (keys, values), strict=True):
            buffer[..., end - keys.shape[-2] : end, :] = new

    def read(self, layer: int) -> Pair:
        """Return the captured tensors."""
        return (self.captured_buffers or self.buffers)[layer]


@committed_fault(
    "ring-rewound-by-index",
    "catalogue BZ-116: rotating cache full, rewind impossible but verification goes on",
    "layout sliding, a full window, and two rejected rows",
)
@in_target_commit("kv.sliding")
class Ring(Sliding):
    """A full ring of the window's size is rewound by its index; what rejected rows overwrote is not restored."""

    def commit_target(self, commit: Commit, path: list[int]) -> str | None:
        """Commit, and lose what the rejected rows had overwritten."""
        written_rows = [self.block(layer) for layer in range(self.layers)]
        end = self.length + self.rows
        why = commit(self, path)
        self._lose(written_rows, end)
        return why

    def _lose(self, written: list[Pair], end: int) -> None:
        """Overwrite the columns whose ring cells rejected rows had taken.

        Args:
            written: Keys and values of every row of the block, by layer.
            end: The number of columns before the rewind.
        """
        for layer, (reach, pair) in enumerate(zip(self.reaches, written, strict=True)):
            for column in range(self.length, end) if reach.span else ():
                row = pair[0].shape[-2] - (end - column)
                # In a ring of `span` cells, columns that differ by a multiple of `span` share a cell.
                for lost_column in range(column - reach.span, self.first(layer) - 1, -reach.span):
                    if lost_column < self.length:
                        self.put(layer, lost_column, (pair[0][..., row : row + 1, :], pair[1][..., row : row + 1, :]))


class RestoresColumn(Static):
    """A static cache that keeps the last committed column of each sequence, and puts it back after a rejection."""

    lane = -1
    sequence = -1
    snapshots: dict[int, list[Pair]]

    def remember(self) -> None:
        """Keep the last committed column under the number of the sequence."""
        last = slice(self.length - 1, self.length)
        if self.length:
            last_columns = [(keys[..., last, :].clone(), values[..., last, :].clone()) for keys, values in self.buffers]
            self.snapshots[self.sequence] = last_columns

    def put_back(self, length: int) -> None:
        """Restore the last of `length` columns from the snapshot under the number of the lane."""
        snapshot = self.snapshots.get(self.lane)
        if length and snapshot is not None:
            for pair, old in zip(self.buffers, snapshot, strict=True):
                for buffer, old_buffer in zip(pair, old, strict=True):
                    buffer[..., length - 1 : length, :] = old_buffer


class NumberingArena(Arena):
    """An arena that gives each sequence the lowest free number, and all sequences one store of snapshots."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._snapshots: dict[int, list[Pair]] = {}
        self._taken_numbers: set[int] = set()

    def lease(self, needs: CacheNeeds) -> CacheLease:
        lease = super().lease(needs)
        if isinstance(lease.target, RestoresColumn):
            lease.target.sequence = min(set(range(len(self._taken_numbers) + 1)) - self._taken_numbers)
            lease.target.snapshots = self._snapshots
            self._taken_numbers.add(lease.target.sequence)
        return lease

    def give_back(self, lease: CacheLease, tokens: tuple[int, ...] = ()) -> None:
        if isinstance(lease.target, RestoresColumn):
            self._taken_numbers.discard(lease.target.sequence)
        super().give_back(lease, tokens)


@committed_fault(
    "snapshot-restored-by-lane",
    "catalogue BZ-120: rollback snapshot of one sequence clobbers others",
    "layout static, and a request with a rejected row in another's lane",
)
def restored_by_lane(seams: Seams) -> Seams:
    """After a rejection the snapshot of another sequence is restored: it is found by the lane of the batch."""

    class ByLane(seams.kv.lanes):  # type: ignore[misc,name-defined]
        def __init__(self, caches: list[KvCache], rows: list[int], filler: float = 0.0) -> None:
            super().__init__(caches, rows, filler)
            for lane, cache in enumerate(caches):
                if isinstance(cache, RestoresColumn):
                    cache.lane = lane
                    cache.remember()

    def commit(cache: KvCache, path: list[int]) -> str | None:
        length = cache.length
        has_rejected = cache.rows > len(path)
        why = seams.commit(cache, path)
        if isinstance(cache, RestoresColumn) and has_rejected:
            cache.put_back(length)
        return why

    return replace(
        seams, commit=commit, arena=NumberingArena, kv=replace(seams.kv, static=RestoresColumn, lanes=ByLane)
    )
