"""Scratch and commit: speculative rows live in a buffer of their own; the commit copies the accepted ones over."""

import torch
from torch import Tensor

from backends.engine.kv.base import KvCache, Pair, Poison, Room, picked


class Scratch:
    """A committed buffer that no forward writes, and a scratch buffer of the rows of one block."""

    def __init__(self, room: Room) -> None:
        self.buffers = [room.empty(room.capacity) for _ in range(room.layers)]
        self.scratch = [room.empty(room.rows) for _ in range(room.layers)]
        self.layers = room.layers
        self.length = 0
        self.rows = 0
        self.most_rows = room.rows
        self._last = 0

    def open(self, rows: int) -> None:
        """Rows follow those already in the scratch buffer."""
        self.rows += rows
        self._last = rows

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write into the scratch buffer."""
        for buffer, new in zip(self.scratch[layer], (keys, values), strict=True):
            buffer[..., self.rows - self._last : self.rows, :] = new

    def read(self, layer: int) -> Pair:
        """The committed columns, then the scratch rows."""
        committed, rows = self.buffers[layer], self.scratch[layer]
        keys, values = (
            torch.cat([one[..., : self.length, :], more[..., : self.rows, :]], -2)
            for one, more in zip(committed, rows, strict=True)
        )
        return keys, values

    def first(self, layer: int) -> int:
        """Every column is there."""
        return 0

    def shown(self, layer: int, visible: Tensor) -> Tensor:
        """As it is."""
        return visible

    def block(self, layer: int) -> Pair:
        """See `KvCache.block`."""
        keys, values = self.scratch[layer]
        return keys[..., : self.rows, :].clone(), values[..., : self.rows, :].clone()

    def amend(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """See `KvCache.amend`."""
        for buffer, new in zip(self.scratch[layer], (keys, values), strict=True):
            buffer[..., : self.rows, :] = new

    def commit(self, path: list[int]) -> str | None:
        """Copy the accepted rows behind the committed ones."""
        end = self.length + len(path)
        for committed, rows in zip(self.buffers, self.scratch, strict=True):
            for buffer, new in zip(committed, picked(rows, path), strict=True):
                buffer[..., self.length : end, :] = new
        self.length, self.rows = end, 0
        return None

    def crop(self, length: int) -> None:
        """See `KvCache.crop`."""
        self.length, self.rows = length, 0

    def begin_as(self, other: KvCache) -> None:
        """See `KvCache.begin_as`."""
        for layer, pair in enumerate(self.buffers):
            for buffer, old in zip(pair, other.held(layer)[1:], strict=True):
                buffer[..., : other.length, :] = old
        self.length = other.length

    def held(self, layer: int) -> tuple[int, Tensor, Tensor]:
        """Everything committed."""
        keys, values = self.buffers[layer]
        return 0, keys[..., : self.length, :].clone(), values[..., : self.length, :].clone()

    def poison(self, number: Poison) -> None:
        """Fill what is free in both buffers."""
        for committed, rows in zip(self.buffers, self.scratch, strict=True):
            for buffer in committed:
                buffer[..., self.length :, :] = number
            for buffer in rows:
                buffer[..., self.rows :, :] = number

    def release(self) -> None:
        """See `KvCache.release`."""
        self.crop(0)
