"""The operands of one call of a fused operator: keys, values, mask and lengths.

Columns are passed in their pages, gathered side by side, or packed into new pages.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specverify.backends.ascend.encodings import key_lengths, require_pages, require_sight
from specverify.backends.engine.columns import AttentionInputs, Paging

BLOCK = 128
"""A block size that every path of fused-infer attention takes; several query rows need a multiple of it."""

LARGEST_BLOCK = 512
"""The largest block size of fused-infer attention."""


@dataclass(frozen=True)
class Operands:
    """The columns, mask and lengths of one call.

    Attributes:
        key: Gathered, [B, Hkv, C, D], or with `table` the cells of a pool, [pages, size, Hkv, D].
        value: As `key`.
        visible: bool [B, 1, T, C]; with `table`, C is the table's width times the page size.
        prefix: int32 [B], on the CPU; see `AttentionInputs`.
        lengths: The key length of each lane: columns up to the last that a row sees.
        table: int32 [B, most pages of a lane], or None for gathered columns.
    """

    key: Tensor
    value: Tensor
    visible: Tensor
    prefix: Tensor
    lengths: list[int]
    table: Tensor | None

    @property
    def size(self) -> int:
        """Columns of a page; 0 without pages."""
        return 0 if self.table is None else int(self.key.shape[1])


def gather_columns(columns: AttentionInputs) -> Operands:
    """The columns side by side, without the tail that no row sees.

    Columns in pages are gathered through the block table, so that the table decides which cells are read.
    """
    if columns.paging is not None:
        return gather_pages(operands_in_pages(columns))
    require_sight(columns.visible)
    lengths = key_lengths(columns.visible)
    end = max(lengths)
    return Operands(
        columns.key[:, :, :end].contiguous(),
        columns.value[:, :, :end].contiguous(),
        columns.visible[..., :end],
        columns.prefix,
        lengths,
        None,
    )


def operands_in_pages(columns: AttentionInputs) -> Operands:
    """The columns in their pages, without a copy.

    A padding row's own key lies in no page. The row must see some column, so it sees the first column of its lane; its
    output is read by nobody.
    """
    paging = columns.paging
    assert paging is not None
    visible = over_pages(columns.visible, paging)
    require_sight(visible)
    lengths = key_lengths(visible)
    require_pages(paging.table, lengths, len(paging.key_cells), paging.size)
    return Operands(paging.key_cells, paging.value_cells, visible, columns.prefix, lengths, paging.table)


def over_pages(visible: Tensor, paging: Paging) -> Tensor:
    """`visible` over the cells of each lane's table; cells past the lane's own columns are hidden."""
    width = paging.table.shape[1] * paging.size
    # The table's last page may reach beyond the mask.
    visible_cells = torch.nn.functional.pad(visible[..., :width], (0, max(0, width - visible.shape[-1])))
    inside = torch.arange(width, device=visible.device)[None] < paging.lengths[:, None]
    visible_cells = visible_cells & inside[:, None, None]
    # A row that saw only its own key, which no page holds, is a padding row.
    padding = ~visible_cells.any(-1, keepdim=True) & visible.any(-1, keepdim=True)
    return torch.cat([visible_cells[..., :1] | padding, visible_cells[..., 1:]], -1)


def gather_pages(operands: Operands) -> Operands:
    """Columns that lie in pages, gathered side by side through the block table.

    The cells behind a shorter lane's columns are unused or belong to other requests. They are zeroed, because a NaN
    there would survive even an attention weight of 0.
    """
    assert operands.table is not None
    end = max(operands.lengths)
    lengths = torch.tensor(operands.lengths, dtype=torch.int32, device=operands.key.device)
    is_behind_lane = torch.arange(end, device=operands.key.device)[None] >= lengths[:, None]
    sides = []
    for cells in (operands.key, operands.value):
        pages = cells[operands.table.long()]  # [B, pages, size, Hkv, D]
        lane_columns = pages.flatten(1, 2)[:, :end].masked_fill(is_behind_lane[..., None, None], 0.0)
        sides.append(lane_columns.transpose(1, 2).contiguous())
    return replace(operands, key=sides[0], value=sides[1], visible=operands.visible[..., :end], table=None)


def pack_into_pages(operands: Operands, size: int) -> Operands:
    """Gathered columns copied into pages of `size` columns, lane after lane, with a block table of their own."""
    batch, heads, columns, dim = operands.key.shape
    pages_per_lane = -(-columns // size)
    spare = pages_per_lane * size - columns
    cells = [
        torch.nn.functional.pad(tensor, (0, 0, 0, spare))
        .transpose(1, 2)
        .reshape(batch * pages_per_lane, size, heads, dim)
        for tensor in (operands.key, operands.value)
    ]
    table = torch.arange(batch * pages_per_lane, dtype=torch.int32, device=cells[0].device).view(batch, pages_per_lane)
    visible = torch.nn.functional.pad(operands.visible, (0, spare))
    return replace(operands, key=cells[0], value=cells[1], visible=visible, table=table)


def with_equal_widths(query: Tensor, operands: Operands) -> tuple[Tensor, Operands]:
    """Query and gathered columns with keys and values of one width.

    The narrower are filled with zeros: in queries and keys they change no score, in values they are outputs to be cut.
    """
    width = max(operands.key.shape[-1], operands.value.shape[-1])
    query, key, value = (
        torch.nn.functional.pad(tensor, (0, width - tensor.shape[-1]))
        for tensor in (query, operands.key, operands.value)
    )
    return query, replace(operands, key=key, value=value)
