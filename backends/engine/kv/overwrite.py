"""The position-overwrite layout, in which a verify forward writes in place.

A verify forward writes columns [pos, pos + rows) of the cache; the commit moves the logical position on. This is sound
only if the cache is updated before attention reads it, because stale rows of a rejected block lie where the next block
is written (ExecuTorch's plan for EAGLE-3). `updated_before_read` tests this for an attention path. The engine refuses
the layout if the test fails.
"""

from collections.abc import Callable

import torch

from specverify.backends.engine.kv.base import CacheSpec, Pair, is_in_order
from specverify.backends.engine.kv.static import Static


class Overwrite(Static):
    """A static buffer; attention reads the columns in use, and a commit of rows that are in order moves no row."""

    def read(self, layer: int) -> Pair:
        """Committed columns and open rows, without the cells after them."""
        keys, values = self.buffers[layer]
        end = self.length + self.rows
        return keys[..., :end, :], values[..., :end, :]

    def cell_mask(self, layer: int, visible: torch.Tensor) -> torch.Tensor:
        """`visible` unchanged: `read` returns the logical columns in order."""
        return visible

    def commit(self, path: list[int]) -> str | None:
        """Move the logical position on; accepted rows that are out of order are moved first, with a reason returned."""
        if is_in_order(path):
            self._advance(len(path))
            return None
        super().commit(path)
        return "the accepted path is not a prefix of the row order: its rows were moved"


def updated_before_read(
    forward: Callable[[Overwrite], torch.Tensor],
    room: CacheSpec,
    committed: int,
    stale: tuple[float, float] = (3.0, -5.0),
) -> bool:
    """Whether a verify forward returns the same bits for two different fillings of the columns that it writes.

    `forward` commits `committed` columns to the cache that it is given, then runs one verify forward, and returns the
    logits of that forward. The cells after the committed columns hold the numbers of `stale`, one per run.
    """
    outputs = []
    for number in stale:
        cache = Overwrite(room)
        for pair in cache.buffers:
            for buffer in pair:
                buffer[..., committed:, :] = number
        outputs.append(forward(cache))
        if cache.length != committed:
            raise ValueError(f"the forward committed {cache.length} columns, not {committed}")
    return torch.equal(*outputs)
