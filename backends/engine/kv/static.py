"""Static: one pre-allocated buffer per layer, which attention reads from end to end; rows are written in place."""

import torch
from torch import Tensor

from backends.engine.kv.base import KvCache, Pair, Poison, Room, picked


class Static:
    """Buffers of `capacity` columns; column c of a committed token is cell c, open rows follow.

    Tensors never change their address, as captured graphs ask for (vLLM and ExecuTorch keep such caches).
    """

    def __init__(self, room: Room) -> None:
        self.buffers = [room.empty(room.capacity) for _ in range(room.layers)]
        self.layers = room.layers
        self.length = 0
        self.rows = 0
        self.most_rows = 0
        self._last = 0

    def open(self, rows: int) -> None:
        """Rows follow the committed columns."""
        self.rows += rows
        self._last = rows

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write in place, after the rows that were open before."""
        end = self.length + self.rows
        for buffer, new in zip(self.buffers[layer], (keys, values), strict=True):
            buffer[..., end - self._last : end, :] = new

    def read(self, layer: int) -> Pair:
        """Every cell, stale ones included: the mask hides them."""
        return self.buffers[layer]

    def first(self, layer: int) -> int:
        """Every column is there."""
        return 0

    def shown(self, layer: int, visible: Tensor) -> Tensor:
        """Cells after the open rows are hidden."""
        spare = self.buffers[layer][0].shape[-2] - visible.shape[-1]
        return torch.nn.functional.pad(visible, (0, spare), value=False)

    def block(self, layer: int) -> Pair:
        """See `KvCache.block`."""
        keys, values = self.buffers[layer]
        rows = slice(self.length, self.length + self.rows)
        return keys[..., rows, :].clone(), values[..., rows, :].clone()

    def amend(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """See `KvCache.amend`."""
        for buffer, new in zip(self.buffers[layer], (keys, values), strict=True):
            buffer[..., self.length : self.length + self.rows, :] = new

    def commit(self, path: list[int]) -> str | None:
        """Move the accepted rows up, from copies: source and destination may overlap."""
        for layer in range(len(self.buffers)):
            kept = picked(self.block(layer), path)
            for buffer, new in zip(self.buffers[layer], kept, strict=True):
                buffer[..., self.length : self.length + len(path), :] = new
        self._advance(len(path))
        return None

    def _advance(self, kept: int) -> None:
        self.length += kept
        self.rows = 0

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
        """Fill the cells after the open rows."""
        for pair in self.buffers:
            for buffer in pair:
                buffer[..., self.length + self.rows :, :] = number

    def release(self) -> None:
        """See `KvCache.release`."""
        self.crop(0)
