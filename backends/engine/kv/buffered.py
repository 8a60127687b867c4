"""The common part of layouts with one pre-allocated buffer per layer."""

from torch import Tensor

from specverify.backends.engine.kv.base import CacheSpec, KvCache


class Buffered:
    """Buffers of `capacity` columns, of which the first `length` are committed: column c is cell c.

    The tensors never change their address, which captured graphs require (vLLM and ExecuTorch keep such caches).
    """

    def __init__(self, room: CacheSpec) -> None:
        self.buffers = [room.empty(room.capacity) for _ in range(room.layers)]
        self.layers = room.layers
        self.latent = room.latent
        self.length = 0
        self.rows = 0
        self.most_rows = 0
        self._last = 0

    def open(self, rows: int) -> None:
        """Count `rows` further rows as open; they follow the rows that are open already."""
        self.rows += rows
        self._last = rows

    def first(self, layer: int) -> int:
        """0: this layout keeps every column."""
        return 0

    def crop(self, length: int) -> None:
        """See `KvCache.crop`."""
        self.length = length
        self.rows = 0

    def begin_as(self, source: KvCache) -> None:
        """See `KvCache.begin_as`."""
        for layer, pair in enumerate(self.buffers):
            for buffer, columns in zip(pair, source.committed_columns(layer)[1:], strict=True):
                buffer[..., : source.length, :] = columns
        self.length = source.length

    def committed_columns(self, layer: int) -> tuple[int, Tensor, Tensor]:
        """All committed columns, from column 0; see `KvCache.committed_columns`."""
        keys, values = self.buffers[layer]
        return 0, keys[..., : self.length, :].clone(), values[..., : self.length, :].clone()

    def release(self) -> None:
        """See `KvCache.release`."""
        self.crop(0)
