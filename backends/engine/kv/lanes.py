"""The KV caches of a batch as one transformers Cache.

A transformers model takes one cache for the whole batch. `BatchCache` passes each lane on to the cache of its request;
`PagedLanes` leaves columns in their pages, and `LeftPadded` puts dead columns in front of each lane.
"""

from collections import Counter
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from specverify.backends.engine.columns import AttentionInputs, Paging, RowWords
from specverify.backends.engine.kv.base import KvCache, read_columns, write_rows
from specverify.backends.engine.kv.padding import beyond
from specverify.backends.engine.kv.paged import Paged, Pool
from specverify.backends.engine.uploads import upload


class BatchCache(Cache):  # type: ignore[misc]  # transformers is untyped here
    """The caches of the requests of one forward; lane b reads and writes the cache of request b.

    Lane b of the batch has `rows[b]` rows of its own and `width - rows[b]` padding rows. Padding rows are never written
    to a cache, and each is visible to itself alone. The columns of lane b are the columns that its cache returns, then
    its padding rows, then cells filled with `filler`, which the mask hides.

    Attributes:
        caches: The cache of each lane's request.
        rows: The rows of each lane, without padding rows.
        width: Rows of the widest lane.
        filler: The number in the cells that the mask hides.
        fallbacks: The reason why attention took a slower path, once for each layer that did.
        filled: The rows of each lane that carry tokens, where those of padding have no finite number; None where
            every row has.
    """

    def __init__(self, caches: list[KvCache], rows: list[int], filler: float = 0.0) -> None:
        super().__init__(layers=[])  # no layers of transformers' own: this class stores nothing itself
        self.caches = caches
        self.rows = rows
        self.width = max(rows)
        self.filler = filler
        self.fallbacks: list[str] = []
        self.filled: list[int] | None = None
        self._prefixes: dict[tuple[int, ...], Tensor] = {}

    @property
    def latent(self) -> bool:
        """Whether the caches hold latent vectors and rotated parts; all caches of a batch are of one layout."""
        return self.caches[0].latent

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Write this forward's rows [B, kv_heads, width, head_dim]; return attention's columns [B, kv_heads, C, D]."""
        lanes = []
        key_states, value_states = self.finite(key_states, value_states)
        for lane, (cache, rows) in enumerate(zip(self.caches, self.rows, strict=True)):
            keys, values = key_states[lane], value_states[lane]
            self._write(lane, layer_idx, keys[:, :rows], values[:, :rows])
            columns = read_columns(cache, layer_idx)
            if rows < self.width:
                # A padding row needs a column that it sees: a softmax over no column would be NaN.
                columns = torch.cat([columns[0], keys[:, rows:]], 1), torch.cat([columns[1], values[:, rows:]], 1)
            lanes.append(columns)
        return self._stack([keys for keys, _ in lanes]), self._stack([values for _, values in lanes])

    def finite(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of this forward's rows [B, heads, width, D], with zeros for rows without a finite number.

        Attention reads such a column under its mask, and a weight of 0 does not hide NaN.
        """
        if self.filled is None:
            return keys, values
        padding = beyond(self.filled, keys.shape[-2], keys.device)[:, None, :, None]
        return keys.masked_fill(padding, 0.0), values.masked_fill(padding, 0.0)

    def _write(self, lane: int, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write the rows of one lane, [kv_heads, rows, head_dim]."""
        write_rows(self.caches[lane], layer, keys, values)

    def _stack(self, lanes: list[Tensor]) -> Tensor:
        """Stack the lanes to [B, kv_heads, widest, head_dim].

        The memory layout is the same for every kind of cache, because the bits of a product depend on strides. A lane
        by itself that has this layout is not copied.
        """
        heads, columns, head_dim = lanes[0].shape
        if len(lanes) == 1 and lanes[0].stride() == (columns * head_dim, head_dim, 1):
            return lanes[0][None]
        shape = (len(lanes), heads, max(tensor.shape[1] for tensor in lanes), head_dim)
        stacked = lanes[0].new_full(shape, self.filler)
        for lane, tensor in enumerate(lanes):
            stacked[lane, :, : tensor.shape[1]] = tensor
        return stacked

    def slower_layers(self) -> int:
        """At least how many layers took a slower path: the layers of the reason that most of them gave."""
        return max(Counter(self.fallbacks).values(), default=0)

    def columns(self, layer: int, key: Tensor, value: Tensor, visible: Tensor) -> AttentionInputs:
        """The inputs of attention in `layer`; `update` returned `key` and `value`, `masks` returned `visible`."""
        prefix = tuple(cache.length - cache.first(layer) for cache in self.caches)
        if prefix not in self._prefixes:  # most layers have the same
            self._prefixes[prefix] = torch.tensor(prefix, dtype=torch.int32)
        paging = self._paging(layer)
        return AttentionInputs(key, value, visible, self._prefixes[prefix], paging, self.fallbacks.append)

    @cached_property
    def _pages(self) -> tuple[Pool, Tensor, Tensor] | None:
        """The pool of all caches, their block tables and lengths, made once for all layers; None without one pool.

        None for a pool of codes too, which no attention reads.
        """
        caches = [cache for cache in self.caches if isinstance(cache, Paged) and cache.codec is None]
        if len(caches) < len(self.caches) or any(cache.pool is not caches[0].pool for cache in caches):
            return None
        return caches[0].pool, *tables(caches, caches[0].pool.layers[0][0].device)

    def _paging(self, layer: int) -> Paging | None:
        if self._pages is None:
            return None
        pool, table, lengths = self._pages
        return Paging(*pool.layers[pool.sources[layer]], table, lengths)

    def masks(self, layer: int, visible: list[Tensor]) -> Tensor:
        """The mask of a layer, bool [B, 1, width, C], from `visible[b]`, bool [rows[b], length + open rows]."""
        lanes = []
        for cache, rows, visible_columns in zip(self.caches, self.rows, visible, strict=True):
            num_padding = self.width - rows
            mask = torch.nn.functional.pad(
                cache.cell_mask(layer, visible_columns), (0, num_padding, 0, num_padding), value=False
            )
            padding = torch.arange(num_padding)
            # Each padding row sees its own column, which `update` appends after the columns of the cache.
            mask[rows + padding, mask.shape[1] - num_padding + padding] = True
            lanes.append(mask)
        return torch.stack(self._align_masks(lanes))[:, None]

    def _align_masks(self, lanes: list[Tensor]) -> list[Tensor]:
        """The masks [width, columns] of all lanes, as wide as the widest; closed columns stand at the right end."""
        widest = max(mask.shape[1] for mask in lanes)
        return [torch.nn.functional.pad(mask, (0, widest - mask.shape[1])) for mask in lanes]

    def logical_masks(self, layer: int, mask: Tensor) -> list[Tensor]:
        """For each lane the mask bool [rows[b], length + open rows] over its logical columns: `masks` undone."""
        lanes = []
        for lane, (cache, rows) in enumerate(zip(self.caches, self.rows, strict=True)):
            first, columns = cache.first(layer), cache.length + cache.rows
            begin = self._first_cell(layer, lane, mask.shape[-1])
            visible = mask[lane, 0, :rows, begin : begin + columns - first]
            lanes.append(torch.nn.functional.pad(visible, (first, 0), value=False))
        return lanes

    def _first_cell(self, layer: int, lane: int, columns: int) -> int:
        """The place of the lane's first cell among so many `columns` of the batch."""
        return 0

    def word_masks(self, layer: int, words: list[RowWords]) -> Tensor:
        """The mask of a layer as `masks` makes it, from the words of each lane's rows."""
        return self.masks(layer, [lane.dense() for lane in words])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns before this forward's rows, of lane 0; the engine gives positions, so no number depends on it."""
        return self.caches[0].length


class PagedLanes(BatchCache):
    """The caches of a batch for an attention that reads pages: no column is gathered if all caches share one pool.

    `update` then returns the rows of this forward alone. Without a common pool it gathers, as `BatchCache` does.
    """

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Write this forward's rows; return these rows, or all columns gathered if the caches share no pool."""
        if self._pages is None:
            return super().update(key_states, value_states, layer_idx)
        key_states, value_states = self.finite(key_states, value_states)
        for lane, rows in enumerate(self.rows):
            self._write(lane, layer_idx, key_states[lane, :, :rows], value_states[lane, :, :rows])
        return key_states, value_states


def tables(caches: list[Paged], device: torch.device) -> tuple[Tensor, Tensor]:
    """Block tables int32 [B, most pages], padded with page 0, and lengths int32 [B], open rows included."""
    page_tables = [torch.tensor(cache.blocks.table, dtype=torch.int32) for cache in caches]
    lengths = torch.tensor([cache.length + cache.rows for cache in caches], dtype=torch.int32)
    padded = torch.nn.utils.rnn.pad_sequence(page_tables, batch_first=True)
    return upload(padded, device), upload(lengths, device)


DEAD = 3e4
"""The content of dead columns: finite in every working dtype, and far from any key or value."""


class LeftPadded(BatchCache):
    """The caches of one forward, with dead columns in front of each lane.

    Attributes:
        front: Dead columns in front of the widest lane.
    """

    front = 0

    def _stack(self, lanes: list[Tensor]) -> Tensor:
        """Stack the lanes to [B, kv_heads, front + widest, head_dim], each at the right end."""
        heads, _, head_dim = lanes[0].shape
        widest = max(tensor.shape[1] for tensor in lanes)
        stacked = lanes[0].new_full((len(lanes), heads, self.front + widest, head_dim), DEAD)
        for lane, tensor in enumerate(lanes):
            stacked[lane, :, stacked.shape[2] - tensor.shape[1] :] = tensor
        return stacked

    def _align_masks(self, lanes: list[Tensor]) -> list[Tensor]:
        """The masks of all lanes, each behind its dead columns, which are closed."""
        dead = self.dead_columns([mask.shape[1] for mask in lanes])
        return [self.close_columns(mask, pad) for mask, pad in zip(lanes, dead, strict=True)]

    def _first_cell(self, layer: int, lane: int, columns: int) -> int:
        """See `BatchCache`: the lane stands at the right end."""
        return columns - self.caches[lane].read(layer)[0].shape[1] - (self.width - self.rows[lane])

    def dead_columns(self, widths: list[int]) -> list[int]:
        """The number of dead columns in front of each lane, whose own columns are `widths`."""
        return [self.front + max(widths) - width for width in widths]

    def close_columns(self, mask: Tensor, dead: int) -> Tensor:
        """The mask [rows, columns] of one lane with `dead` closed columns in front."""
        return torch.nn.functional.pad(mask, (dead, 0), value=False)

    def columns(self, layer: int, key: Tensor, value: Tensor, visible: Tensor) -> AttentionInputs:
        """See `BatchCache.columns`; the dead columns are part of a prefix whose beginning no row sees."""
        committed = [cache.length - cache.first(layer) for cache in self.caches]
        lanes = zip(self.caches, self.rows, strict=True)
        widths = [cache.read(layer)[0].shape[1] + self.width - rows for cache, rows in lanes]
        prefix_lengths = [pad + length for pad, length in zip(self.dead_columns(widths), committed, strict=True)]
        prefix = torch.tensor(prefix_lengths, dtype=torch.int32)
        return AttentionInputs(key, value, visible, prefix, None, self.fallbacks.append)


_CLASSES: dict[tuple[type[LeftPadded], int], type[LeftPadded]] = {}


def with_front(kind: type[LeftPadded], front: int) -> type[LeftPadded]:
    """The class `kind` with `front` dead columns in front of the widest lane; one class for equal arguments."""
    if (kind, front) not in _CLASSES:
        _CLASSES[kind, front] = type(kind.__name__, (kind,), {"front": front, "__doc__": kind.__doc__})
    return _CLASSES[kind, front]
