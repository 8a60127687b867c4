"""Branch and commit: speculate in a replica of the committed cache, then bring the accepted rows home (EAGLE-Pangu)."""

import os

import torch
from torch import Tensor

from backends.engine.kv.base import KvCache, Pair, Room, in_order, picked

FAST_SWITCH = "EA_FAST_CACHE_REORDER"
"""Environment switch of the fast reorder, as EAGLE-Pangu calls it: 0 never, 1 also where `path` is asked for."""


class Branch:
    """Committed tensors, and while rows are open a branch that shares no storage with them.

    `how` is the way of the commit: `path` gathers the whole branch by accepted rows; `fast` leaves the committed
    prefix where it is and appends the accepted rows alone, and falls back on any boundary or shape inconsistency;
    `length` crops the branch, which only suits a path that is in place already, and falls back elsewhere.
    """

    def __init__(self, room: Room, how: str) -> None:
        self._how = how
        self.kept: list[Pair] = [room.empty(0) for _ in range(room.layers)]
        self.branch: list[Pair] = []
        self.layers = room.layers
        self.length = 0
        self.rows = 0
        self.most_rows = 0

    def open(self, rows: int) -> None:
        """Replicate the committed cache, once, and announce `rows`."""
        if not self.rows:
            self.branch = [(keys.clone(), values.clone()) for keys, values in self.kept]
        self.rows += rows

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Append to the branch."""
        old = self.branch[layer]
        self.branch[layer] = torch.cat([old[0], keys], -2), torch.cat([old[1], values], -2)

    def read(self, layer: int) -> Pair:
        """The branch."""
        return self.branch[layer]

    def shown(self, layer: int, visible: Tensor) -> Tensor:
        """As it is."""
        return visible

    def block(self, layer: int) -> Pair:
        """See `KvCache.block`."""
        keys, values = self.branch[layer]
        return keys[..., self.length :, :].clone(), values[..., self.length :, :].clone()

    def amend(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """See `KvCache.amend`."""
        self.branch[layer] = tuple(  # type: ignore[assignment]
            torch.cat([old[..., : self.length, :], new], -2)
            for old, new in zip(self.branch[layer], (keys, values), strict=True)
        )

    def commit(self, path: list[int]) -> str | None:
        """See `KvCache.commit`."""
        if not self.rows:
            return None
        how, why = self._way(path)
        if how == "length":
            end = self.length + len(path)
            kept = [(keys[..., :end, :].clone(), values[..., :end, :].clone()) for keys, values in self.branch]
        elif how == "fast":
            kept = [self._appended(mine, other, path) for mine, other in zip(self.kept, self.branch, strict=True)]
        else:
            rows = [*range(self.length), *(self.length + row for row in path)]
            kept = [picked(pair, rows) for pair in self.branch]
        self.kept, self.branch, self.rows = kept, [], 0
        self.length += len(path)
        return why

    def _way(self, path: list[int]) -> tuple[str, str | None]:
        """The way to go, and why it is not the one asked for."""
        switch = os.environ.get(FAST_SWITCH)
        if self._how == "length":
            return (
                ("length", None) if in_order(path) else ("path", "the accepted path is not a prefix of the row order")
            )
        if self._how == "fast" and switch == "0":
            return "path", f"{FAST_SWITCH}=0"
        if self._how == "fast" or switch == "1":
            why = cannot_share(self.kept, self.branch, self.length)
            return ("fast", None) if why is None else ("path", why)
        return "path", None

    def _appended(self, mine: Pair, other: Pair, path: list[int]) -> Pair:
        keys, values = picked(other, [self.length + row for row in path])
        return torch.cat([mine[0], keys], -2), torch.cat([mine[1], values], -2)

    def crop(self, length: int) -> None:
        """See `KvCache.crop`."""
        self.kept = [(keys[..., :length, :].clone(), values[..., :length, :].clone()) for keys, values in self.kept]
        self.length, self.rows, self.branch = length, 0, []

    def begin_as(self, other: KvCache) -> None:
        """See `KvCache.begin_as`."""
        self.kept = [other.held(layer)[1:] for layer in range(len(self.kept))]
        self.length = other.length

    def held(self, layer: int) -> tuple[int, Tensor, Tensor]:
        """Everything committed."""
        keys, values = self.kept[layer]
        return 0, keys.clone(), values.clone()

    def poison(self, number: float) -> None:
        """Nothing to poison: no cell is free."""

    def release(self) -> None:
        """See `KvCache.release`."""
        self.crop(0)


def cannot_share(kept: list[Pair], branch: list[Pair], length: int) -> str | None:
    """Why the committed prefix may not be reused under the branch's rows, or None if every layer agrees."""
    if not length:
        return "there is no committed prefix to share"
    if len(kept) != len(branch):
        return f"{len(kept)} committed layers under {len(branch)} of the branch"
    for index, (mine, other) in enumerate(zip(kept, branch, strict=True)):
        if any(one.shape[-2] != length for one in mine):
            return f"layer {index} holds {mine[0].shape[-2]} columns, the cache {length}"
        if mine[0].shape[:-2] != other[0].shape[:-2] or mine[0].dtype != other[0].dtype:
            return f"layer {index} of the branch has another shape or dtype"
        if other[0].shape[-2] < length:
            return f"layer {index} of the branch is shorter than the prefix"
    return None
