"""Faults of KV layouts without pages: the commit of accepted rows."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specverify.backends.engine.kv.arena import Arena, CacheLease, Model
from specverify.backends.engine.kv.base import KvCache, Pair, pick_columns
from specverify.backends.engine.kv.branch import Branch
from specverify.backends.engine.kv.scratch import Scratch
from specverify.backends.engine.kv.sliding import Sliding
from specverify.backends.engine.kv.static import Static
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import committed_fault, in_place_of

# The draft's cache is of the same class: what a fault does to the target alone, it does in the seam of its commit.


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


class Fast(Branch):
    """A branch cache that tells which way a commit takes."""

    def is_fast(self, path: list[int]) -> bool:
        """Whether the accepted rows are appended to the prefix where it lies."""
        return self.way_of(path)[0] == "fast"


@committed_fault(
    "fast-reorder-without-offset",
    "family of catalogue BZ-133: one way of the commit has an index formula of its own",
    "commit by fast, over a prefix",
)
def fast_without_offset(seams: Seams) -> Seams:
    """The fast reorder takes rows by their index in the block, without the length of the prefix before them."""

    def commit(cache: KvCache, path: list[int]) -> str | None:
        if isinstance(cache, Fast) and cache.is_fast(path):
            for layer in range(cache.layers):
                block = cache.block(layer)
                for cells, wrong_rows in zip(block, pick_columns(cache.read(layer), path), strict=True):
                    cells[..., path, :] = wrong_rows
                cache.amend(layer, *block)
        return seams.commit(cache, path)

    return replace(seams, commit=commit, kv=replace(seams.kv, branch=Fast))


@committed_fault(
    "scratch-committed-in-row-order",
    "family of catalogue BZ-132: compaction that presumes increasing rows",
    "layout scratch, and an accepted node whose row comes before its parent's",
)
@in_place_of("commit")
def scratch_in_row_order(seams: Seams, cache: KvCache, path: list[int]) -> str | None:
    """Accepted scratch rows are copied in the order of the rows, not in that of the path."""
    return seams.commit(cache, sorted(path) if isinstance(cache, Scratch) else path)


class Flat(Scratch):
    """A scratch cache that commits behind the rows of all earlier blocks, rejected ones included."""

    rejected = 0

    def commit_flat(self, path: list[int]) -> None:
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
    "committed-at-flat-index",
    "catalogue BZ-153: committed token part wrong after the second tree verification",
    "layout scratch, and a step after one with a rejected row",
)
def at_flat_index(seams: Seams) -> Seams:
    """From the second tree on, accepted rows are committed at their index among all rows, not at their depth.

    The first commit is right, because nothing was rejected before it.
    """

    def commit(cache: KvCache, path: list[int]) -> str | None:
        if not isinstance(cache, Flat):
            return seams.commit(cache, path)
        cache.commit_flat(path)
        return None

    return replace(seams, commit=commit, kv=replace(seams.kv, scratch=Flat))


class CropsAnew(Static):
    """A static cache whose crop makes new tensors, while forwards go on with the captured ones."""

    captured_buffers: list[Pair] | None = None

    def crop_anew(self) -> None:
        """Copy the committed columns into new tensors, and keep the old ones as the captured tensors."""
        self.captured_buffers = self.captured_buffers or self.buffers
        fresh = [(torch.zeros_like(keys), torch.zeros_like(values)) for keys, values in self.buffers]
        for pair, old in zip(fresh, self.buffers, strict=True):
            for buffer, old_buffer in zip(pair, old, strict=True):
                buffer[..., : self.length, :] = old_buffer[..., : self.length, :]
        self.buffers = fresh

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write into the captured tensors."""
        end = self.length + self.rows
        for buffer, new in zip((self.captured_buffers or self.buffers)[layer], (keys, values), strict=True):
            buffer[..., end - keys.shape[-2] : end, :] = new

    def read(self, layer: int) -> Pair:
        """Return the captured tensors."""
        return (self.captured_buffers or self.buffers)[layer]


@committed_fault(
    "crop-makes-new-tensors",
    "catalogue BZ-109: crop on StaticCache creates a new shorter cache",
    "layout static, and a step after one with a rejected row",
)
def cropped_anew(seams: Seams) -> Seams:
    """A crop of the static cache makes new tensors, while the forward goes on writing to the old ones.

    A captured forward keeps the tensors of its recording, here the old ones.
    """

    def commit(cache: KvCache, path: list[int]) -> str | None:
        has_rejected = cache.rows > len(path)
        why = seams.commit(cache, path)
        if isinstance(cache, CropsAnew) and has_rejected:
            cache.crop_anew()
        return why

    return replace(seams, commit=commit, kv=replace(seams.kv, static=CropsAnew))


class Ring(Sliding):
    """A sliding cache that loses columns as a ring of the window's size does when its index is rewound."""

    def lose(self, written: list[Pair], end: int) -> None:
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


@committed_fault(
    "ring-rewound-by-index",
    "catalogue BZ-116: rotating cache full, rewind impossible but verification goes on",
    "layout sliding, a full window, and two rejected rows",
)
def ring_rewound(seams: Seams) -> Seams:
    """A full ring of the window's size is rewound by its index; what rejected rows overwrote is not restored."""

    def commit(cache: KvCache, path: list[int]) -> str | None:
        if not isinstance(cache, Ring):
            return seams.commit(cache, path)
        written_rows = [cache.block(layer) for layer in range(cache.layers)]
        end = cache.length + cache.rows
        why = seams.commit(cache, path)
        cache.lose(written_rows, end)
        return why

    return replace(seams, commit=commit, kv=replace(seams.kv, sliding=Ring))


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

    def lease(
        self,
        target: Model,
        draft: Model | None,
        capacity: int,
        rows: int,
        tokens: tuple[int, ...] = (),
        adapter: object = None,
    ) -> CacheLease:
        lease = super().lease(target, draft, capacity, rows, tokens, adapter)
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
