"""The interface of a KV cache: committed columns, speculative rows after them, and a commit of some of those rows."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from backends.engine.reach import Reach

Pair = tuple[Tensor, Tensor]
"""Keys and values."""

Poison = float | Tensor
"""The contents of one head of a poisoned cell: a number, or [head_dim]."""


@dataclass(frozen=True)
class CacheSpec:
    """The sizes that a cache must know before anything is written.

    Attributes:
        reaches: How far back each layer sees.
        kv_heads: Heads of keys and values.
        head_dim: Numbers of a head.
        capacity: Columns that a request may need at most, speculative rows included.
        rows: Rows that one forward may open at most.
        device: Where it lives.
        dtype: Of keys and values.
    """

    reaches: tuple[Reach, ...]
    kv_heads: int
    head_dim: int
    capacity: int
    rows: int
    device: torch.device
    dtype: torch.dtype

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return len(self.reaches)

    def empty(self, columns: int) -> Pair:
        """Zeros [kv_heads, columns, head_dim], twice."""
        shape = (self.kv_heads, columns, self.head_dim)
        zeros = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return zeros, zeros.clone()


class KvCache(Protocol):
    """One request's keys and values for one model.

    Logical columns are the committed tokens 0..length-1 in the order of their positions, then the open rows in the
    order in which they were opened. A layout may keep them anywhere, hold more cells than that, or fewer where a layer
    can no longer see them; attention reads what `read` returns, under the mask that `shown` makes.

    Attributes:
        length: Committed columns.
        rows: Open rows.
        most_rows: Rows that may be open at once; 0 for any number.
        layers: Layers of the model.
    """

    length: int
    rows: int
    most_rows: int
    layers: int

    def open(self, rows: int) -> None:
        """Make room for `rows` rows after those already open; nothing committed changes.

        Raises:
            OutOfPages: where a pool has no page left for them.
        """
        ...

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write the rows opened last, [kv_heads, rows, head_dim]; every layer is written before the next `open`."""
        ...

    def read(self, layer: int) -> Pair:
        """Keys and values [kv_heads, C, head_dim] as attention reads them."""
        ...

    def first(self, layer: int) -> int:
        """The first committed column that `read` returns: no row to come can see one before it."""
        ...

    def shown(self, layer: int, visible: Tensor) -> Tensor:
        """`visible`, bool [R, length + rows] over logical columns, as bool [R, C] over those that `read` returns."""
        ...

    def block(self, layer: int) -> Pair:
        """A copy of the open rows, [kv_heads, rows, head_dim]."""
        ...

    def amend(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write all open rows anew, [kv_heads, rows, head_dim]."""
        ...

    def commit(self, path: list[int]) -> str | None:
        """Keep the open rows `path`, in the order of their positions, and close the others.

        Returns:
            Why the fast way of this layout was not taken, or None.
        """
        ...

    def crop(self, length: int) -> None:
        """Forget committed columns from `length` on, and every open row."""
        ...

    def begin_as(self, other: "KvCache") -> None:
        """Hold what `other`, a cache of the same layout and model, has committed; this one is still empty."""
        ...

    def held(self, layer: int) -> tuple[int, Tensor, Tensor]:
        """The first committed column that is still there, and a copy of keys and values from it on."""
        ...

    def poison(self, number: Poison) -> None:
        """Fill every cell that holds neither a committed column nor an open row, so that reading one shows."""
        ...

    def release(self) -> None:
        """The request is over: give everything back."""
        ...


class OutOfPages(Exception):
    """A pool has no free page for a row that must be written; the message says how many are missing."""


def in_order(path: list[int]) -> bool:
    """Whether the path is the first rows of the block, in place already."""
    return path == list(range(len(path)))


def picked(pair: Pair, path: list[int]) -> Pair:
    """Copies of the columns `path` of keys and values [kv_heads, columns, head_dim]."""
    index = torch.tensor(path, dtype=torch.long, device=pair[0].device)
    return pair[0].index_select(-2, index), pair[1].index_select(-2, index)
