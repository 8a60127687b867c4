"""The interface of a KV cache, and the sizes from which one is made.

A cache holds committed columns, then the speculative rows that a forward has opened. A commit keeps some of these rows.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from specverify.backends.engine.reach import Reach
from specverify.backends.engine.uploads import upload

Pair = tuple[Tensor, Tensor]
"""Keys and values."""

Poison = float | Tensor
"""The content of one head of a poisoned cell: a number, or a tensor [head_dim]."""


class Codec(Protocol):
    """The stored form of keys and values; in the engine, `specverify.backends.engine.kv.codec.KvCodec`."""

    def widths(self, layer: int) -> tuple[int, int]:
        """The bytes of one head's cell of keys, and of values, in `layer`."""
        ...

    def encode(self, layer: int, pair: Pair) -> Pair:
        """Keys and values [kv_heads, rows, width] as cells, uint8 [kv_heads, rows, bytes]."""
        ...

    def decode(self, layer: int, pair: Pair) -> Pair:
        """Cells of keys and values as numbers in the working dtype."""
        ...

    def shown_codes(self, layer: int, pair: Pair) -> Tensor:
        """The codes in cells [kv_heads, rows, bytes], int64 [rows, numbers]: keys head after head, then values."""
        ...

    def poison(self, number: Poison, width: int) -> Tensor:
        """A cell [bytes] of `width` bytes that holds `number`, or a key that is repeated or cut to its width."""
        ...


@dataclass(frozen=True)
class CacheSpec:
    """The sizes from which a cache is allocated.

    Attributes:
        reaches: The reach of each layer.
        kv_heads: Number of KV heads.
        head_dim: Length of a head of keys.
        capacity: The largest number of columns that a request may need, speculative rows included.
        rows: The largest number of rows that one forward may open.
        device: The device of the cache.
        dtype: The dtype of keys and values.
        value_dim: Length of a head of values; 0 for that of keys.
        latent_widths: For latent attention, the lengths of a latent vector and of a rotated part; None elsewhere.
        latent: Whether the cache holds those, as keys and values of one head.
        recurrent: Number of layers with a recurrent state, which stands beside the cache.
        heads_by_layer: For each layer the number of KV heads and the widths of keys and values, where these differ;
            empty where all layers have `kv_heads` of `widths`. A layer that reads another layer's columns has 0 heads
            of its own.
        index_widths: For each layer the width of the index key behind each of its keys, or 0; empty for a model without
            an indexer of columns.
        sources: For each layer the one whose columns it reads; empty where each layer reads its own.
        codec: What is stored in place of keys and values; None where they are stored as they are.
    """

    reaches: tuple[Reach, ...]
    kv_heads: int
    head_dim: int
    capacity: int
    rows: int
    device: torch.device
    dtype: torch.dtype
    value_dim: int = 0
    latent_widths: tuple[int, int] | None = None
    latent: bool = False
    recurrent: int = 0
    heads_by_layer: tuple[tuple[int, int, int], ...] = ()
    index_widths: tuple[int, ...] = ()
    sources: tuple[int, ...] = ()
    codec: Codec | None = None

    def as_latent(self) -> "CacheSpec":
        """The sizes of a cache of latent rows; unchanged for a model without latent attention."""
        if self.latent_widths is None:
            return self
        rank, rotated = self.latent_widths
        return replace(self, kv_heads=1, head_dim=rank, value_dim=rotated, latent=True)

    @property
    def widths(self) -> tuple[int, int]:
        """The length of a head of keys, and of one of values."""
        return self.head_dim, self.value_dim or self.head_dim

    @property
    def layers(self) -> int:
        """Number of layers of the model."""
        return len(self.reaches)

    def sizes(self, layer: int) -> tuple[int, tuple[int, int]]:
        """The number of KV heads that `layer` writes, and the widths of its keys and values."""
        if self.index_widths:
            keys, values = self.widths
            return self.kv_heads, (keys + self.index_widths[layer], values)
        if not self.heads_by_layer:
            return self.kv_heads, self.widths
        heads, *widths = self.heads_by_layer[layer]
        return heads, (widths[0], widths[1])

    def source(self, layer: int) -> int:
        """The layer whose columns `layer` reads."""
        return self.sources[layer] if self.sources else layer

    def cells(self, layer: int) -> tuple[int, tuple[int, int], torch.dtype]:
        """The number of KV heads that `layer` writes, and the widths and dtype of their cells of keys and values."""
        heads, widths = self.sizes(layer)
        return (heads, widths, self.dtype) if self.codec is None else (heads, self.codec.widths(layer), torch.uint8)

    def empty(self, columns: int, layer: int) -> Pair:
        """Cells of zeros of the keys and values of `layer`, [kv_heads, columns, width] each."""
        heads, widths, dtype = self.cells(layer)
        keys, values = (torch.zeros((heads, columns, width), dtype=dtype, device=self.device) for width in widths)
        return keys, values


class KvCache(Protocol):
    """One request's keys and values for one model.

    Logical columns are the committed tokens 0..length-1 in the order of their positions, then the open rows in the
    order in which they were opened. A layout may store columns in any place. It may hold more cells than columns, or
    fewer if a layer can no longer see some columns. Attention reads the result of `read` under the mask of `cell_mask`.
    A cache with a codec takes and gives cells in place of keys and values, which `write_rows`, `read_columns` and
    `held_columns` translate.

    Attributes:
        length: Number of committed columns.
        rows: Number of open rows.
        most_rows: The largest number of rows that may be open at once; 0 for no limit.
        layers: Number of layers of the model.
        latent: Whether its keys and values are latent vectors and rotated parts (`CacheSpec.latent`).
        codec: See `CacheSpec.codec`.
    """

    length: int
    rows: int
    most_rows: int
    layers: int
    latent: bool
    codec: Codec | None

    def open(self, rows: int) -> None:
        """Make room for `rows` rows after the rows already open; committed columns do not change.

        Raises:
            OutOfPages: if the pool has too few free pages for the rows.
        """
        ...

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write the rows opened last, [kv_heads, rows, head_dim]; every layer is written before the next `open`."""
        ...

    def read(self, layer: int) -> Pair:
        """Keys and values [kv_heads, C, head_dim] as attention reads them, in logical order from column `first` on."""
        ...

    def first(self, layer: int) -> int:
        """The first committed column that `read` returns; no later row can see a column before it."""
        ...

    def cell_mask(self, layer: int, visible: Tensor) -> Tensor:
        """The mask `visible`, bool [R, length + rows] over logical columns, as bool [R, C] over the cells of `read`."""
        ...

    def block(self, layer: int) -> Pair:
        """A copy of the open rows, [kv_heads, rows, head_dim]."""
        ...

    def amend(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Overwrite all open rows with `keys` and `values`, [kv_heads, rows, head_dim]."""
        ...

    def commit(self, path: list[int]) -> str | None:
        """Commit the open rows `path`, in the order of their positions, and close the other open rows.

        Return the reason why the fast way of this layout was not taken, or None.
        """
        ...

    def crop(self, length: int) -> None:
        """Forget committed columns from `length` on, and every open row."""
        ...

    def begin_as(self, source: "KvCache") -> None:
        """Copy all columns that `source`, a cache of the same layout and model, has committed; this cache is empty."""
        ...

    def committed_columns(self, layer: int) -> tuple[int, Tensor, Tensor]:
        """The first committed column that the layer still holds, and copies of keys and values from that column on."""
        ...

    def poison(self, number: Poison) -> None:
        """Fill every cell that holds neither a committed column nor an open row, so that a wrong read is noticed."""
        ...

    def release(self) -> None:
        """Give all storage back, because the request is over or evicted."""
        ...


class OutOfPages(Exception):
    """A pool has too few free pages for rows that must be written; the message says how many are needed and free."""


def write_rows(cache: KvCache, layer: int, keys: Tensor, values: Tensor) -> None:
    """Write the keys and values of the rows opened last, [kv_heads, rows, width], as `cache` stores them."""
    pair = (keys, values)
    cache.write(layer, *(pair if cache.codec is None else cache.codec.encode(layer, pair)))


def read_columns(cache: KvCache, layer: int) -> Pair:
    """The keys and values that attention reads of `cache`, in the working dtype; see `KvCache.read`."""
    pair = cache.read(layer)
    return pair if cache.codec is None else cache.codec.decode(layer, pair)


def held_columns(cache: KvCache, layer: int) -> tuple[int, Tensor, Tensor]:
    """`KvCache.committed_columns` in the working dtype."""
    first, keys, values = cache.committed_columns(layer)
    return first, *((keys, values) if cache.codec is None else cache.codec.decode(layer, (keys, values)))


def poison_of_width(number: Poison, cells: Tensor, codec: Codec | None = None) -> Poison:
    """The poison of `cells` [..., width]: a key is repeated or cut to their width, since values may have another."""
    if codec is not None:
        return codec.poison(number, cells.shape[-1])
    if isinstance(number, float) or len(number) == cells.shape[-1]:
        return number
    return number[torch.arange(cells.shape[-1], device=number.device) % len(number)]


def is_in_order(path: list[int]) -> bool:
    """Whether the path consists of the first rows of the block, in order, so that no row must move."""
    return path == list(range(len(path)))


def pick_columns(pair: Pair, path: list[int]) -> Pair:
    """Copies of the columns `path` of keys and values [kv_heads, columns, head_dim]."""
    index = upload(torch.tensor(path, dtype=torch.long), pair[0].device)
    return pair[0].index_select(-2, index), pair[1].index_select(-2, index)
