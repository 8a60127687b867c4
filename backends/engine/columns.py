"""AttentionInputs: keys and values that the rows of a forward may attend to in one layer, gathered or in pages."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from backends.base import Unsupported


@dataclass(frozen=True)
class Paging:
    """Where the columns of a layer lie in a pool of pages.

    Column c of lane b lies in page `table[b, c // size]` at offset `c % size`. Entries of the table beyond a lane's own
    pages are 0, a page that exists; they are never read, since `lengths` ends before them.

    Attributes:
        key_cells: [pages, size, kv_heads, head_dim].
        value_cells: As `key_cells`.
        table: int32 [B, most pages of a lane].
        lengths: int32 [B]; columns of each lane, prefix and block.
    """

    key_cells: Tensor
    value_cells: Tensor
    table: Tensor
    lengths: Tensor

    @property
    def size(self) -> int:
        """Columns of a page."""
        return int(self.key_cells.shape[1])


@dataclass(frozen=True)
class AttentionInputs:
    """The columns that B lanes of T rows each attend to: a prefix, a block of open rows, then cells that no row sees.

    The prefix of lane b is columns 0 to `prefix[b]`, committed tokens in the order of their positions: a row sees an
    unbroken run of it up to its end (a window or chunk may hide its beginning), or none if the row is padding. The
    block is what follows: the rows of this forward are its last ones, and a row sees any of them.

    Attributes:
        key: [B, Hkv, C, D], gathered; where `paging` is given and keys were not gathered, this forward's rows alone.
        value: As `key`.
        visible: bool [B, 1, T, C] on the device of the query; a row that is padding sees itself alone.
        prefix: int32 [B], on the CPU.
        paging: The same columns in their pages; None for layouts without, and where the lanes do not share a pool.
        announce: To be called with the reason, in one line, by a path that leaves the work to a slower one.
        cap: Soft cap of the scores: a scaled score s becomes cap * tanh(s / cap) before the mask; 0.0 for none. A path
            that does not compute it calls `refuse_cap`.
    """

    key: Tensor
    value: Tensor
    visible: Tensor
    prefix: Tensor
    paging: Paging | None
    announce: Callable[[str], None]
    cap: float = 0.0

    def refuse_cap(self, path: str) -> None:
        """Raise Unsupported if there is a soft cap: the attention called `path` does not compute it."""
        if self.cap:
            raise Unsupported(
                f"softcap: {path} computes no soft cap of the scores; "
                "written-out attention does (cpu-eager, cuda-eager, or --mode reference)"
            )


Attend = Callable[[Tensor, AttentionInputs, float], Tensor]
"""attend(query [B, H, T, D], columns, scaling) -> [B, H, T, D], in the query's dtype."""
