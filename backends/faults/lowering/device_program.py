"""Faults of the lowering by tensor operations, and of words in place of masks."""

from collections.abc import Callable, MutableMapping
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from specverify.backends.base import Unsupported
from specverify.backends.engine.columns import RowWords
from specverify.backends.engine.kv.base import KvCache
from specverify.backends.engine.lowering.device import DeviceLowering
from specverify.backends.engine.lowering.lanes import WordLanes
from specverify.backends.engine.reach import Reach
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import attended_fault, in_place_of, lowered_fault

WORDS = "cpu-split-words"

words_fault = partial(lowered_fault, on=WORDS)
BUDGET = 512
"""Bytes of the largest dense mask under these faults. Without a budget every mask is words."""

Masked = Callable[[WordLanes, int, list[RowWords]], Tensor]
"""From the lanes of a forward, a layer and the words of each request's rows to the layer's mask."""


def with_word_masks(seams: Seams, word_masks: Masked) -> Seams:
    """`seams` with a budget for dense masks, and with `word_masks` in place of the method of that name.

    Raises:
        Unsupported: if the attention reads no words.
    """
    right = seams.kv.lanes
    if not issubclass(right, WordLanes):
        raise Unsupported("a fault of dense masks in place of words: this backend's attention reads a mask")
    lanes = type("Budgeted", (right,), {"budget": BUDGET, "word_masks": word_masks})
    return replace(seams, kv=replace(seams.kv, lanes=lanes))


def is_dense(mask: Tensor) -> bool:
    """Whether `mask` is a dense mask; a stand-in has strides of 0 alone."""
    return any(mask.stride())


@attended_fault(
    "dense-mask-not-cleared",
    "family of sgl-project/sglang #19741: the custom mask in a buffer kept between steps is not the tree's",
    "two steps of different trees whose dense masks are within the budget",
    on=WORDS,
)
def not_cleared(seams: Seams) -> Seams:
    """Dense masks of a layer are written to one buffer, in which no bit of the mask of the step before is cleared."""
    right: Any = seams.kv.lanes
    buffers: MutableMapping[KvCache, dict[int, Tensor]] = WeakKeyDictionary()  # by the first request's cache

    def word_masks(lanes: WordLanes, layer: int, words: list[RowWords]) -> Tensor:
        mask: Tensor = right.word_masks(lanes, layer, words)
        if not is_dense(mask):
            return mask
        layer_buffers = buffers.setdefault(lanes.caches[0], {})
        buffer = layer_buffers.setdefault(layer, torch.zeros(BUDGET, dtype=torch.bool))[: mask.numel()]
        buffer |= mask.flatten()
        return buffer.view_as(mask).clone()

    return with_word_masks(seams, word_masks)


@attended_fault(
    "dense-mask-as-wide-as-first-lane",
    "family of unslothai/unsloth issue 3699: one width for a batch in place of each sequence's own",
    "a batch whose second request has more columns than the first, and a dense mask within the budget",
    on=WORDS,
)
def wide_as_first(seams: Seams) -> Seams:
    """A batch's dense mask is as wide as that of its first request alone: longer requests lose their last columns."""
    right: Any = seams.kv.lanes

    def word_masks(lanes: WordLanes, layer: int, words: list[RowWords]) -> Tensor:
        mask: Tensor = right.word_masks(lanes, layer, words)
        first = lanes.caches[0]
        num_shown = first.cell_mask(layer, torch.zeros(1, first.length + first.rows, dtype=torch.bool)).shape[1]
        if is_dense(mask):
            mask[..., num_shown + lanes.width - lanes.rows[0] :] = False
        return mask

    return with_word_masks(seams, word_masks)


in_device_lowering = partial(
    in_place_of,
    owner=DeviceLowering,
    refusal="a fault of the lowering by tensor operations: this backend lowers trees on the host",
)
"""A decorator as `in_place_of`, for a part of the lowering on a device."""


@words_fault(
    "words-after-first-not-written",
    "word boundary of packed masks, as xgrammar's and FlashInfer's are packed",
    "a tree of more than 32 rows",
)
@in_device_lowering("lower_tree.block_words")
def first_word_alone(program: DeviceLowering, *args: Any) -> Tensor:
    """Ancestor bits are written to the first word alone: no row sees rows from 32 on, not even itself."""
    words: Tensor = program.block_words(*args)
    return torch.cat([words[..., :1], torch.zeros_like(words[..., 1:])], -1)


@words_fault(
    "words-of-padded-tree-off-by-one",
    "family of catalogue BZ-092: offset of a mask's rows",
    "a tree padded to more rows than it has",
)
@in_device_lowering("lower_tree.block_words")
def padded_off_by_one(
    program: DeviceLowering, ancestor: Tensor, depth: Tensor, position: Tensor, valid: Tensor, reach: Reach
) -> Tensor:
    """In a padded tree the words of a row are those of the row before it."""
    words: Tensor = program.block_words(ancestor, depth, position, valid, reach)
    return torch.where(valid.all(1)[:, None, None], words, words.roll(1, 1))


@words_fault(
    "ancestors-doubled-once-too-few", "family of catalogue BZ-108: positions of a block", "a tree of three levels"
)
@in_device_lowering("lower_tree.climb")
def doubled_too_few(program: DeviceLowering, parent: Tensor, levels: int) -> Tensor:
    """Ancestors are found by doubling, with a round too few: whatever lies more than two levels up is not found.

    The depth of a row, which is counted from its ancestors, is then two at most.
    """
    lift: Tensor = program.climb(parent, levels)
    return torch.cat([lift[:2], torch.zeros_like(lift[2:])])


@words_fault(
    "first-column-of-root-for-all-rows",
    "catalogue BZ-095: window start from one token of the block",
    "a window or chunk shorter than the context, and a node below the root",
)
@in_device_lowering("lower_tree.first_columns")
def first_of_root(program: DeviceLowering, position: Tensor, valid: Tensor, committed: Tensor, reach: Reach) -> Tensor:
    """The first column that the root sees is the first column of every row of the tree."""
    columns: Tensor = program.first_columns(position, valid, committed, reach)
    return torch.where(valid, columns[:, :1], columns)


@words_fault(
    "sibling-links-across-parents", "family of catalogue BZ-078: links of a tree's rows", "two nodes that have children"
)
@in_device_lowering("lower_tree.next_siblings")
def linked_across_parents(program: DeviceLowering, parent: Tensor, has_siblings: Tensor) -> Tensor:
    """The last child of a node is linked to the first child of the next node that has any, as if it were a sibling."""
    return program.next_siblings(torch.zeros_like(parent), has_siblings)


@words_fault(
    "first-child-is-last-child",
    "family of catalogue BZ-078: links of a tree's rows, here by a maximum where the minimum belongs",
    "a node with two children",
)
@in_device_lowering("lower_tree.first_children")
def last_child_first(program: DeviceLowering, parent: Tensor, has_parent: Tensor) -> Tensor:
    """The link to a node's first child is that to its last child, so that earlier siblings are never tried."""
    row = torch.arange(parent.shape[1], device=parent.device).expand_as(parent)
    return torch.zeros_like(parent).scatter_reduce(1, parent, torch.where(has_parent, row, 0), "amax")


@words_fault(
    "word-with-row-31-saturated",
    "family of guidance-ai/llguidance #330: the bits of a packed mask's words were read as another number",
    "a tree of at least 32 rows",
)
@in_device_lowering("lower_tree.block_words")
def saturated_word(program: DeviceLowering, *args: Any) -> Tensor:
    """A word whose bit 31 is set is clamped to the greatest int32: its row sees rows 0 to 30, and not row 31."""
    words: Tensor = program.block_words(*args)
    return torch.where(words < 0, torch.iinfo(torch.int32).max, words)


@attended_fault(
    "words-begin-at-dropped-columns",
    "family of catalogue BZ-095: window start in columns of the request, read in columns of the ring",
    "a sliding layer that has dropped columns",
    on=WORDS,
)
def begin_at_dropped(seams: Seams) -> Seams:
    """The first column of a row, counted from the beginning of the text, is read as a column of the layer's ring.

    A ring that has dropped columns begins later, so that each row sees fewer columns than its window has.
    """
    right = seams.kv.lanes
    if not issubclass(right, WordLanes):
        raise Unsupported("a fault of words in place of a mask: this backend's attention reads a mask")

    class FromBeginning(right):  # type: ignore[valid-type, misc]
        """Lanes whose words are counted from the beginning of the text."""

        def word_masks(self, layer: int, words: list[RowWords]) -> Tensor:
            late = [
                replace(lane, first=(lane.first + cache.first(layer)).clamp(max=lane.committed))
                for lane, cache in zip(words, self.caches, strict=True)
            ]
            masks: Tensor = super().word_masks(layer, late)
            return masks

    return replace(seams, kv=replace(seams.kv, lanes=FromBeginning))
