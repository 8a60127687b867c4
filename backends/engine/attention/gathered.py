"""Eager attention over columns that may lie in pages of a pool.

Fused paths that read pages use it as their eager attention, in mode `reference` and for inputs without a kernel.
"""

from dataclasses import replace

import torch
from torch import Tensor

from specverify.backends.engine.attention.eager import eager
from specverify.backends.engine.columns import AttentionInputs, Paging


def eager_gathered(query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
    """Run `eager` on columns that are first gathered from their pages, if they lie in pages; see `columns.Attend`."""
    return eager(query, gather_columns(columns), scaling)


def gather_columns(columns: AttentionInputs) -> AttentionInputs:
    """The same columns with keys and values [B, Hkv, C, D]; a column that lies in no page of its lane is zeros."""
    # Keys as wide as the mask are all columns; otherwise they are this forward's rows, and the rest lies in pages.
    if columns.paging is None or columns.key.shape[2] == columns.visible.shape[-1]:
        return columns
    return replace(
        columns,
        key=_read_cells(columns.paging, columns.paging.key_cells, columns.visible.shape[-1]),
        value=_read_cells(columns.paging, columns.paging.value_cells, columns.visible.shape[-1]),
    )


def _read_cells(paging: Paging, cells: Tensor, width: int) -> Tensor:
    column = torch.arange(width, device=cells.device)
    # Columns beyond a lane's length are read from any page of its table, then replaced by zeros.
    in_pages = column < paging.lengths[:, None]
    block = (column // paging.size).clamp(max=paging.table.shape[1] - 1)
    slots = paging.table[:, block].long() * paging.size + column % paging.size
    gathered_cells = cells.flatten(0, 1)[slots]
    return gathered_cells.masked_fill(~in_pages[..., None, None], 0.0).transpose(1, 2)
