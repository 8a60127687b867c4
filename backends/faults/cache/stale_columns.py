"""Faults of stale cache columns that a verify forward sees.

The cache holds more cells than are committed, or other contents than the committed ones.
"""

from dataclasses import replace

from torch import Tensor

from specverify.backends.engine.kv.base import KvCache
from specverify.backends.engine.kv.contiguous import Overwrite, Static
from specverify.backends.engine.kv.lanes import BatchCache
from specverify.backends.engine.kv.sliding import Sliding
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import attended_fault

# The draft's cache is of the same class: lanes of the verify forward tell that a cache is the target's.


@attended_fault(
    "ring-trimmed-for-one-token",
    "catalogue BZ-117: ring cache eviction assumes one token per call",
    "layout sliding, a full window, and a node below the root",
)
def ring_for_one_token(seams: Seams) -> Seams:
    """A ring is trimmed as if one token came per call, so that deeper rows of a block see beyond their window."""

    class TrimmedForOneToken(seams.kv.lanes):  # type: ignore[misc,name-defined]
        def masks(self, layer: int, visible: list[Tensor]) -> Tensor:
            opened_masks = [
                self._all(*cache_and_mask, layer) for cache_and_mask in zip(self.caches, visible, strict=True)
            ]
            masks: Tensor = super().masks(layer, opened_masks)
            return masks

        def _all(self, cache: KvCache, mask: Tensor, layer: int) -> Tensor:
            if not isinstance(cache, Sliding):
                return mask
            mask = mask.clone()
            mask[:, cache.first(layer) : cache.length] = True
            return mask

    return replace(seams, kv=replace(seams.kv, lanes=TrimmedForOneToken))


class MarkedStatic(Static):
    """A static cache that knows how far it was ever written, and whether the forward verifies a tree."""

    verifying = False
    high = 0
    stale = 0

    def open(self, rows: int) -> None:
        super().open(rows)
        # `stale` is the end of what earlier blocks wrote, `high` the end with this block.
        self.stale = self.high
        self.high = max(self.high, self.length + self.rows)


class Tail(MarkedStatic):
    """A cache that shows the columns which rejected rows left behind the open rows."""

    def cell_mask(self, layer: int, visible: Tensor) -> Tensor:
        """The mask of `Static`, with the stale tail visible in a verify forward."""
        mask: Tensor = super().cell_mask(layer, visible)
        if self.verifying:
            mask[..., self.length + self.rows : self.stale] = True
        return mask


class TakenForCached(MarkedStatic, Overwrite):
    """A cache that takes a column which was written before for a column that is cached."""

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write the rows, but not the root where a rejected row has filled its column."""
        root = [cells[..., self.length : self.length + 1, :].clone() for cells in self.buffers[layer]]
        super().write(layer, keys, values)
        if self.verifying and self.stale > self.length:
            for buffer, old in zip(self.buffers[layer], root, strict=True):
                buffer[..., self.length : self.length + 1, :] = old


def _marking_lanes(lanes: type[BatchCache]) -> type[BatchCache]:
    """The batch cache `lanes`, which also tells the target's caches that their forward verifies a tree."""

    class MarkingLanes(lanes):  # type: ignore[misc,valid-type]
        def __init__(self, caches: list[KvCache], rows: list[int], filler: float = 0.0) -> None:
            super().__init__(caches, rows, filler)
            for cache in caches:
                if isinstance(cache, MarkedStatic):
                    cache.verifying = True

    return MarkingLanes


@attended_fault(
    "static-tail-attended",
    "family of catalogue BZ-109: a pre-allocated cache whose length is not followed by the forward",
    "layout static, and a smaller block after one with rejected rows",
)
def stale_tail_shown(seams: Seams) -> Seams:
    """The mask over a static cache leaves open what rejected rows have left behind the block."""
    return replace(seams, kv=replace(seams.kv, static=Tail, lanes=_marking_lanes(seams.kv.lanes)))


@attended_fault(
    "stale-column-taken-for-cached",
    "family of catalogue BZ-116: rejected entries remain",
    "layout overwrite, and a step after one with a rejected row",
)
def stale_row_kept(seams: Seams) -> Seams:
    """A column that a rejected row has filled is taken for cached, and the token that belongs there is not written."""
    return replace(seams, kv=replace(seams.kv, overwrite=TakenForCached, lanes=_marking_lanes(seams.kv.lanes)))
