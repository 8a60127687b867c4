"""Faults of a batch of requests with unequal trees or prefixes in one forward.

Rows, padding or columns of one lane are written, read or seen in the place of another's.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specverify.backends.engine.kv.arena import Arena, CacheLease, CacheNeeds
from specverify.backends.engine.kv.base import KvCache
from specverify.backends.engine.kv.lanes import BatchCache
from specverify.backends.engine.kv.paged import Paged
from specverify.backends.engine.lower_tree import TreeTensors
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import attended_fault, in_place_of, scored_fault


@attended_fault(
    "tree-size-of-first-lane",
    "catalogue BZ-136: strange tokens of a batch larger than one",
    "a batch whose first tree is not the largest",
)
@in_place_of("kv.lanes")
class OneSize(BatchCache):
    """The tree size of the first request of the batch is used for all: longer ones are taken for padding."""

    def masks(self, layer: int, visible: list[Tensor]) -> Tensor:
        right = super().masks(layer, visible)
        first_rows = self.rows[0]
        for lane, (cache, rows) in enumerate(zip(self.caches, self.rows, strict=True)):
            # The mask of a padding row: its own column and no other.
            alone = torch.zeros(rows, cache.length + cache.rows, dtype=torch.bool)
            alone[torch.arange(rows), cache.length + torch.arange(rows)] = True
            shown_columns = cache.cell_mask(layer, alone)
            right[lane, 0, first_rows:rows] = False
            right[lane, 0, first_rows:rows, : shown_columns.shape[1]] = shown_columns[first_rows:]
        return right


@attended_fault(
    "padded-rows-over-neighbours",
    "catalogue BZ-084: padded rows copied into a buffer sized for real tokens",
    "a batch whose first tree is smaller than another",
)
@in_place_of("kv.lanes")
class PackedBatch(BatchCache):
    """Padded rows are copied as they lie into a buffer for the real rows: padding lands on the next request's rows."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        real = sum(self.rows)
        moved_states = [
            self._unpacked(states, states.transpose(0, 1).flatten(1, 2)[:, :real])
            for states in (key_states, value_states)
        ]
        return super().update(moved_states[0], moved_states[1], layer_idx)

    def _unpacked(self, padded_rows: Tensor, packed_rows: Tensor) -> Tensor:
        lanes = padded_rows.clone()
        begin = 0
        for lane, rows in enumerate(self.rows):
            lanes[lane, :, :rows] = packed_rows[:, begin : begin + rows]
            begin += rows
        return lanes


@attended_fault(
    "padding-writes-slot-zero",
    "catalogue BZ-049: padded rows point to a live slot 0",
    "pages, and a batch of unequal trees while a request holds page 0",
)
@in_place_of("kv.lanes")
class NoNullSlot(BatchCache):
    """Padding rows write to slot 0, which belongs to a living request, instead of to a slot that nobody reads."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        for lane, (cache, rows) in enumerate(zip(self.caches, self.rows, strict=True)):
            if rows < self.width and isinstance(cache, Paged):
                for cells, new in zip(cache.pool.layers[layer_idx], (key_states, value_states), strict=True):
                    # The last row of a lane with spare rows is a padding row.
                    cells.flatten(0, 1)[0] = new[lane, :, -1]
        return super().update(key_states, value_states, layer_idx)


@attended_fault(
    "mask-of-first-lane", "family of catalogue BZ-136: row 0 of the batch stands for every row", "a batch of two"
)
@in_place_of("kv.lanes")
class OneMask(BatchCache):
    """The tree mask of the first request of the batch is used for all."""

    def masks(self, layer: int, visible: list[Tensor]) -> Tensor:
        right = super().masks(layer, visible)
        return right[:1].expand_as(right)


@attended_fault(
    "caches-in-slot-order",
    "catalogue BZ-075: decoder slots not in batch order",
    "pages, and a batch in another order than that of the first pages of its requests",
)
@in_place_of("kv.lanes")
class BySlot(BatchCache):
    """The order of slots is taken for the order of the batch: rows attend to another request's cache."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        keys, values = super().update(key_states, value_states, layer_idx)
        slot = sorted(range(len(self.caches)), key=lambda lane: _slot(self.caches[lane], lane))
        return keys[slot], values[slot]


def _slot(cache: KvCache, lane: int) -> int:
    """The first page of a cache, or its lane where it has none."""
    return cache.blocks.table[0] if isinstance(cache, Paged) else lane


@attended_fault(
    "filler-of-batch-seen",
    "family of catalogue BZ-097: padding lanes stay in the softmax",
    "a batch of unequal prefixes or trees",
)
@in_place_of("kv.lanes")
class Open(BatchCache):
    """A request with a shorter prefix sees the filler behind its own columns."""

    def masks(self, layer: int, visible: list[Tensor]) -> Tensor:
        right = super().masks(layer, visible)
        for lane, (cache, rows) in enumerate(zip(self.caches, self.rows, strict=True)):
            own_columns = cache.cell_mask(layer, visible[lane]).shape[1] + self.width - rows
            right[lane, :, :, own_columns:] = True
        return right


@attended_fault(
    "padding-rows-of-batch-seen",
    "family of catalogue BZ-097: padding lanes stay in the softmax",
    "a batch of unequal trees",
)
@in_place_of("kv.lanes")
class PaddingSeen(BatchCache):
    """A request with a smaller tree sees the padding rows of its lane."""

    def masks(self, layer: int, visible: list[Tensor]) -> Tensor:
        right = super().masks(layer, visible)
        for lane, (cache, rows) in enumerate(zip(self.caches, self.rows, strict=True)):
            begin = cache.cell_mask(layer, visible[lane]).shape[1]
            right[lane, :, :, begin : begin + self.width - rows] = True
        return right


@attended_fault(
    "buffer-without-room-for-tree",
    "catalogue BZ-073: buffers sized by context length instead of speculative capacity",
    "a pre-allocated layout; a tree wider than high, or padded, near the end of the output",
)
@in_place_of("arena")
class Tight(Arena):
    """KV buffers are sized by the longest text without the tree that hangs from its end.

    Buffers lose the columns of the speculative rows; pages, which are reserved on demand, are not affected.
    """

    def lease(self, needs: CacheNeeds) -> CacheLease:
        if self.layout.traits.pages:
            return super().lease(needs)
        return super().lease(replace(needs, capacity=needs.capacity - needs.rows))


@scored_fault(
    "retrieve-index-without-offset",
    "family of catalogue BZ-136: sgl-project/sglang, retrieve_index counts rows of the flattened batch",
    "a batch of two",
)
@in_place_of("retrieve")
def without_offset(seams: Seams, batch: list[TreeTensors], lane: int) -> Tensor:
    """The rows of a request are counted from the beginning of the batch: each reads the logits of the first."""
    return batch[lane].retrieve_index


@scored_fault(
    "retrieve-index-counts-nodes",
    "family of catalogue BZ-084: rows that pad a tree are not counted where the rows of a batch are laid end to end",
    "a batch of two, the first of whose trees is padded",
)
@in_place_of("retrieve")
def offset_in_nodes(seams: Seams, batch: list[TreeTensors], lane: int) -> Tensor:
    """The rows before a request are counted by the nodes of trees, without the rows that pad them."""
    return batch[lane].retrieve_index + sum(len(tensors.retrieve_index) for tensors in batch[:lane])
