"""Faults of the dense mask that a budget of bytes allows in place of words."""

from collections.abc import Callable, MutableMapping
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from specverify.backends.base import Unsupported
from specverify.backends.engine.columns import RowWords
from specverify.backends.engine.kv.base import KvCache
from specverify.backends.engine.lowering.lanes import WordLanes
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import attended_fault, faults_in

WORDS = "cpu-split-words"
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


FAULTS = faults_in(globals())
