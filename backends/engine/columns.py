"""The inputs of attention in one layer: keys, values, visibility and pages.

`AttentionInputs` holds the columns to which the rows of a forward may attend, either gathered into one tensor or left
in the pages of a pool. Every attention implementation has the signature `Attend`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specverify.backends.base import Unsupported

WORD = 32
"""Bits of a word; bit 31 is the sign of an int32."""


@dataclass(frozen=True)
class Paging:
    """The place of a layer's columns in a pool of pages.

    Column c of lane b lies in page `table[b, c // size]` at offset `c % size`. Entries of the table beyond a lane's own
    pages are 0, a page that exists; no kernel reads them, since `lengths` ends before them.

    Attributes:
        key_cells: [pages, size, kv_heads, head_dim].
        value_cells: As `key_cells`.
        table: int32 [B, W]; the block table of each lane, W the number of pages of the longest.
        lengths: int32 [B]; columns of each lane, prefix and block together.
    """

    key_cells: Tensor
    value_cells: Tensor
    table: Tensor
    lengths: Tensor

    @property
    def size(self) -> int:
        """The number of columns in a page."""
        return int(self.key_cells.shape[1])


class Absorbed(Protocol):
    """The projections of latent attention that queries and output absorb (`attention/latent.py`)."""

    def queries(self, query: Tensor) -> Tensor:
        """Queries of keys as queries of latent rows."""
        ...

    def values(self, latent_output: Tensor) -> Tensor:
        """Mixed latent vectors as the output of attention."""
        ...


@dataclass(frozen=True)
class AttentionInputs:
    """The columns to which B lanes of T rows each attend: a prefix, a block of open rows, then cells no row sees.

    The prefix of lane b is columns 0 to `prefix[b]`: committed tokens in the order of their positions. A row sees an
    unbroken run of the prefix up to its end (a window or chunk may hide its beginning). A padding row sees none of it.
    The block follows the prefix. The rows of this forward are the last columns of the block, and a row may see any
    subset of the block.

    Attributes:
        key: [B, Hkv, C, D], gathered. If `paging` is given and keys were not gathered, the rows of this forward alone.
        value: As `key`; a head of values may have another width, the E of `Attend`.
        visible: bool [B, 1, T, C] on the device of the query; a padding row sees itself alone.
        prefix: int32 [B], on the CPU.
        paging: The same columns in their pages; None for layouts without pages, and if the lanes do not share a pool.
        announce: An attention path calls it with a reason, in one line, before it leaves the work to a slower path. An
            attention that chooses among ways calls it with CHOSEN and the way.
        cap: Soft cap of the scores: a scaled score s becomes cap * tanh(s / cap) before the mask; 0.0 for no cap. A
            path that does not compute the cap calls `refuse_cap`.
        sinks: The sink of each query head, [H], a score whose column has no value; None for no sinks. A path that does
            not compute them calls `refuse_sinks`.
        absorbed: Where `key` and `value` are latent vectors and rotated parts of one KV head, the projections that
            expand them; None for keys and values. No path sees it: `attention/latent.py` stands before all of them.
        indexed: Whether `visible` shows each row columns that an indexer chose: no unbroken run of the prefix. A path
            that goes by runs calls `refuse_indexed`.
        latent: Whether the columns are latent rows of one KV head, made ready by `attention/latent.py`: keys then begin
            with the values. A path may take them as keys and values of two widths.
    """

    key: Tensor
    value: Tensor
    visible: Tensor
    prefix: Tensor
    paging: Paging | None
    announce: Callable[[str], None]
    cap: float = 0.0
    sinks: Tensor | None = None
    absorbed: Absorbed | None = None
    latent: bool = False
    indexed: bool = False

    def refuse_indexed(self, path: str) -> None:
        """Raise Unsupported if an indexer chose columns, of which the attention called `path` reads runs alone."""
        if self.indexed:
            raise Unsupported(
                f"indices: {path} reads unbroken runs of the prefix, and here an indexer chose columns for each row; "
                "written-out attention takes any (cpu-eager, cuda-eager, or --mode reference)"
            )

    def refuse_sinks(self, path: str) -> None:
        """Raise Unsupported if there are sinks, which the attention called `path` does not compute."""
        if self.sinks is not None:
            raise Unsupported(
                f"s_aux: {path} computes no sinks, which take a share of each softmax; written-out attention does "
                "(cpu-eager, cuda-eager, or --mode reference), and so do split attention, our Triton kernel and "
                "FlexAttention"
            )

    def refuse_unequal(self, path: str) -> None:
        """Raise Unsupported if values have another width than keys, which the attention called `path` cannot hold."""
        keys, values = self.key.shape[-1], self.value.shape[-1]
        if keys != values:
            raise Unsupported(
                f"v_head_dim: {path} takes values as wide as keys, and here keys are {keys} wide and values {values}; "
                "written-out attention takes both (cpu-eager, cuda-eager, or --mode reference), and so does cpu-split"
            )

    def refuse_cap(self, path: str) -> None:
        """Raise Unsupported if there is a soft cap, which the attention called `path` does not compute."""
        if self.cap:
            raise Unsupported(
                f"softcap: {path} computes no soft cap of the scores; "
                "written-out attention does (cpu-eager, cuda-eager, or --mode reference)"
            )


@dataclass(frozen=True)
class RowWords:
    """The columns that R rows see in layers of one reach: a run of the prefix up to its end, and bits of the block.

    Row r sees the committed columns `first[r]` to `committed`, and row j of the block if bit `j % 32` of word `j // 32`
    of `bits[r]` is set. The numbers that are not tensors are known to the host before anything ran.

    Attributes:
        first: int32 [R]; `committed` for a row that sees none of the prefix.
        bits: int32 [R, W].
        committed: Columns of the prefix.
        earliest: The largest of the first columns that a row of the tree may see; 0 if every row sees all of them.
        padded: Whether some rows pad the tree; such a row sees itself alone.
    """

    first: Tensor
    bits: Tensor
    committed: int
    earliest: int
    padded: bool

    def dense(self) -> Tensor:
        """The same columns as a mask, bool [R, committed + R]."""
        prefix = torch.arange(self.committed, device=self.first.device) >= self.first[:, None]
        row = torch.arange(len(self.first), device=self.first.device)
        return torch.cat([prefix, (self.bits[:, row // WORD] >> row % WORD & 1).bool()], 1)


def signed(numbers: Tensor) -> Tensor:
    """Words of 32 bits held in int64 as the int32 words with the same bits."""
    return torch.where(numbers >= 2 ** (WORD - 1), numbers - 2**WORD, numbers).int()


Attend = Callable[[Tensor, AttentionInputs, float], Tensor]
"""attend(query [B, H, T, D], columns, scaling) -> [B, H, T, E], in the query's dtype; E is the width of values."""
