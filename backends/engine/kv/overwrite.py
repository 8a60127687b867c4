"""Position-overwrite: verify writes [pos, pos + rows) of the cache itself, then the logical position moves on.

Sound only where the cache is updated before attention reads it: stale rows of a rejected block lie where the next block
is written (ExecuTorch's plan for EAGLE-3). `updated_before_read` shows it for an attention path, and layouts are
refused where it cannot be shown.
"""

from collections.abc import Callable

import torch

from backends.engine.kv.base import CacheSpec, Pair, in_order
from backends.engine.kv.static import Static


class Overwrite(Static):
    """A static buffer of which attention reads the columns in use, and whose commit moves nothing if it can."""

    def read(self, layer: int) -> Pair:
        """Committed columns and open rows."""
        keys, values = self.buffers[layer]
        end = self.length + self.rows
        return keys[..., :end, :], values[..., :end, :]

    def shown(self, layer: int, visible: torch.Tensor) -> torch.Tensor:
        """As it is."""
        return visible

    def commit(self, path: list[int]) -> str | None:
        """Move the logical position on; rows that are not in place yet are moved first, and that is said."""
        if in_order(path):
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
    """Whether a verify forward returns the same bits whatever stale rows lie where it writes.

    `forward` commits `committed` columns to the cache it is given, calls nothing else before its verify forward, and
    returns that forward's logits.
    """
    seen = []
    for number in stale:
        cache = Overwrite(room)
        for pair in cache.buffers:
            for buffer in pair:
                buffer[..., committed:, :] = number
        seen.append(forward(cache))
        if cache.length != committed:
            raise ValueError(f"the forward committed {cache.length} columns, not {committed}")
    return torch.equal(*seen)
