"""The caches of a batch for an attention that reads words in place of a mask.

A dense mask is made only if a budget of bytes has room for it. An attention that reads nothing else tells where its
masks are larger than the budget.
"""

from typing import Any

import torch
from torch import Tensor

from specverify.backends.engine.attention.compact import MOST_WIDTH, Lane, pack_lanes, stand_in
from specverify.backends.engine.columns import RowWords
from specverify.backends.engine.kv.lanes import BatchCache, PagedLanes


class WordLanes(BatchCache):
    """`BatchCache` whose masks are stand-ins for the compact form, straight from the words of each request's rows.

    transformers hands a mask from the forward to each layer. In place of a dense one it is given a tensor of the mask's
    shape over one byte of memory, for which `compact` returns the compact form.

    Attributes:
        budget: The largest number of bytes of a dense mask that is made all the same; 0 for none.
        dense: The class that takes this one's place where eager attention reads the mask.
    """

    budget = 0
    dense: type[BatchCache] = BatchCache

    def word_masks(self, layer: int, words: list[RowWords]) -> Tensor:
        """A stand-in for the mask of a layer, [B, 1, width, C], or the dense mask with the reason in `fallbacks`."""
        lanes = [
            Lane(lane, cache.first(layer), self._width(cache_at, layer), self.width - rows, self.are_gathered)
            for cache_at, (lane, cache, rows) in enumerate(zip(words, self.caches, self.rows, strict=True))
        ]
        columns = max(lane.width + lane.spare for lane in lanes)
        size = len(lanes) * self.width * columns
        if size <= self.budget:
            self.fallbacks.append(f"a dense mask: its bytes are within the budget of {self.budget}")
        elif max(lane.block for lane in lanes) > MOST_WIDTH:
            self.fallbacks.append(f"a dense mask: a block has more than {MOST_WIDTH} columns")
        else:
            return stand_in(pack_lanes(lanes, words[0].first.device), columns)
        return super().word_masks(layer, words)

    @property
    def are_gathered(self) -> bool:
        """Whether attention gets all columns in one tensor, where a padding row has a column of its own."""
        return True

    def _width(self, lane: int, layer: int) -> int:
        """The columns of one lane's cache in a layer, as the mask of a row shows them."""
        cache = self.caches[lane]
        row = torch.zeros((), dtype=torch.bool).expand(1, cache.length + cache.rows)
        return cache.cell_mask(layer, row).shape[-1]


class PagedWordLanes(WordLanes, PagedLanes):
    """`WordLanes` for an attention that reads pages."""

    dense: type[BatchCache] = PagedLanes

    @property
    def are_gathered(self) -> bool:
        """True where the caches share no pool."""
        return self._pages is None


def lanes_within(budget: int, kind: type[WordLanes] = PagedWordLanes) -> type[WordLanes]:
    """The class `kind` with a budget of bytes for dense masks."""
    return type(kind.__name__, (kind,), {"budget": budget, "__doc__": kind.__doc__})


def dense_lanes_within(budget: int, kind: type[BatchCache]) -> type[BatchCache]:
    """The class `kind`, whose attention reads dense masks alone, telling where one has more bytes than `budget`."""

    class DenseLanes(kind):  # type: ignore[misc,valid-type]
        __doc__ = kind.__doc__

        def masks(self, *arguments: Any) -> Tensor:
            mask: Tensor = super().masks(*arguments)
            if mask.numel() > budget:
                self.fallbacks.append(
                    f"a dense mask beyond the budget of {budget} bytes: this attention reads no words"
                )
            return mask

    return DenseLanes
