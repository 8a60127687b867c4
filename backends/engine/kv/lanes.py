"""BatchCache: the KV caches of the requests of one forward, as the one cache that transformers' models ask for."""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from backends.engine.columns import AttentionInputs, Paging
from backends.engine.kv.base import KvCache
from backends.engine.kv.paged import Paged, Pool


class BatchCache(Cache):  # type: ignore[misc]  # transformers is untyped here
    """Request b writes and reads its own cache; what its neighbours need more of is padding.

    Lane b of the batch has `rows[b]` rows of its own and `width - rows[b]` padding rows, which are never written to
    any cache and are seen by nobody but themselves. Its columns are what its cache returns, then its padding rows,
    then cells filled with `filler`, which the mask hides.

    Attributes:
        fallbacks: Why attention took a slower path, once for each layer that did.
    """

    def __init__(self, caches: list[KvCache], rows: list[int], filler: float = 0.0) -> None:
        super().__init__(layers=[])
        self._caches = caches
        self._rows = rows
        self._width = max(rows)
        self._filler = filler
        self.fallbacks: list[str] = []

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Write this forward's rows [B, kv_heads, width, head_dim]; return what attention reads [B, kv_heads, C, D]."""
        lanes = []
        for lane, (cache, rows) in enumerate(zip(self._caches, self._rows, strict=True)):
            keys, values = key_states[lane], value_states[lane]
            self._write(lane, layer_idx, keys[:, :rows], values[:, :rows])
            held = cache.read(layer_idx)
            if rows < self._width:
                held = torch.cat([held[0], keys[:, rows:]], 1), torch.cat([held[1], values[:, rows:]], 1)
            lanes.append(held)
        return self._stacked([keys for keys, _ in lanes]), self._stacked([values for _, values in lanes])

    def _write(self, lane: int, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write the rows of one lane, [kv_heads, rows, head_dim]."""
        self._caches[lane].write(layer, keys, values)

    def _stacked(self, lanes: list[Tensor]) -> Tensor:
        """[B, kv_heads, widest, head_dim], laid out in memory alike for every cache: bits depend on strides."""
        heads, _, head_dim = lanes[0].shape
        shape = (len(lanes), heads, max(one.shape[1] for one in lanes), head_dim)
        stacked = lanes[0].new_full(shape, self._filler)
        for lane, one in enumerate(lanes):
            stacked[lane, :, : one.shape[1]] = one
        return stacked

    def columns(self, layer: int, key: Tensor, value: Tensor, visible: Tensor) -> AttentionInputs:
        """The inputs of attention in `layer`: `key` and `value` as `update` returned them, `visible` as `masks` did."""
        prefix = torch.tensor([cache.length - cache.first(layer) for cache in self._caches], dtype=torch.int32)
        return AttentionInputs(key, value, visible, prefix, self._paging(layer), self.fallbacks.append)

    @cached_property
    def _pages(self) -> tuple[Pool, Tensor, Tensor] | None:
        """The pool that all caches share, their block tables and lengths, made once for all layers; None without."""
        caches = [cache for cache in self._caches if isinstance(cache, Paged)]
        if len(caches) < len(self._caches) or any(cache.pool is not caches[0].pool for cache in caches):
            return None
        return caches[0].pool, *tables(caches, caches[0].pool.layers[0][0].device)

    def _paging(self, layer: int) -> Paging | None:
        if self._pages is None:
            return None
        pool, table, lengths = self._pages
        return Paging(*pool.layers[layer], table, lengths)

    def masks(self, layer: int, visible: list[Tensor]) -> Tensor:
        """Bool [B, 1, width, C] of what each lane's rows see, from `visible[b]`, bool [rows[b], length + open rows]."""
        lanes = []
        for cache, rows, seen in zip(self._caches, self._rows, visible, strict=True):
            spare = self._width - rows
            mask = torch.nn.functional.pad(cache.shown(layer, seen), (0, spare, 0, spare), value=False)
            own = torch.arange(spare)
            mask[rows + own, mask.shape[1] - spare + own] = True
            lanes.append(mask)
        widest = max(mask.shape[1] for mask in lanes)
        return torch.stack([torch.nn.functional.pad(one, (0, widest - one.shape[1])) for one in lanes])[:, None]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns before this forward's rows; positions are always given, so nothing is derived from it."""
        return self._caches[0].length


class PagedLanes(BatchCache):
    """Lanes of which nothing is gathered where every cache is paged in one pool: attention reads the pages.

    `update` then returns this forward's rows alone. Other caches are handed over as `BatchCache` does.
    """

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Write this forward's rows; return them, or what `BatchCache` gathers where there are no pages."""
        if self._pages is None:
            return super().update(key_states, value_states, layer_idx)
        for lane, rows in enumerate(self._rows):
            self._write(lane, layer_idx, key_states[lane, :, :rows], value_states[lane, :, :rows])
        return key_states, value_states


def tables(caches: list[Paged], device: torch.device) -> tuple[Tensor, Tensor]:
    """Block tables int32 [B, most pages], padded with page 0, and lengths int32 [B], open rows included."""
    held = [torch.tensor(cache.blocks.table, dtype=torch.int32) for cache in caches]
    lengths = torch.tensor([cache.length + cache.rows for cache in caches], dtype=torch.int32)
    return torch.nn.utils.rnn.pad_sequence(held, batch_first=True).to(device), lengths.to(device)
