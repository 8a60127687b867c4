"""The attention of ascend-fused-atb: tree attention by ATB's splitfuse operator.

The operator takes a ragged batch of queries over pages of keys and values, under an additive mask.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specverify.backends.ascend.eager import ascend_eager
from specverify.backends.ascend.encodings import additive
from specverify.backends.ascend.operands import BLOCK, Operands, gather_columns, operands_in_pages, pack_into_pages
from specverify.backends.engine.columns import Attend, AttentionInputs

ROOM = 128 * 128
"""The most elements (block size times head dimension) that a block may hold for one head."""

LARGEST_HEAD = 256
"""The largest head dimension that the operator takes."""


@dataclass(frozen=True)
class AscendAtb:
    """Attention by `_npu_paged_attention_splitfuse`, the same code on a device with NNAL and on the emulation.

    Columns that lie in no pages, or in pages of a size that the operator does not read, are copied into suitable pages.
    A call that falls back to `eager` is announced.

    Attributes:
        pages: Makes operands of columns that lie in pages.
        columns: Makes operands of gathered columns, which are then packed into pages.
        encode: Makes the additive mask from the rows' visible columns and the query's dtype.
        eager: The attention that takes over where the operator cannot run, and in mode `reference`.
    """

    pages: Callable[[AttentionInputs], Operands] = operands_in_pages
    columns: Callable[[AttentionInputs], Operands] = gather_columns
    encode: Callable[[Tensor, torch.dtype], Tensor] = additive
    eager: Attend = ascend_eager

    def __call__(self, query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
        """See `columns.Attend`."""
        columns.refuse_cap("ATB's splitfuse attention")
        columns.refuse_indexed("ATB's splitfuse attention")
        columns.refuse_sinks("ATB's splitfuse attention")
        columns.refuse_unequal("ATB's splitfuse attention")
        if query.shape[-1] > LARGEST_HEAD or query.dtype not in (torch.float16, torch.bfloat16):
            columns.announce(f"eager: {query.dtype} with head dimension {query.shape[-1]} is nothing for splitfuse")
            return self.eager(query, columns, scaling)
        operands = self._operands_in_pages(columns, query.shape[-1])
        assert operands.table is not None
        batch, heads, rows, dim = query.shape
        # The operator has no batch axis: rows of all requests follow each other, and `seq_len` tells them apart.
        tokens = query.transpose(1, 2).reshape(batch * rows, heads, dim).contiguous()
        out = torch.empty_like(tokens)
        torch.ops.atb._npu_paged_attention_splitfuse(
            tokens,
            operands.key,
            operands.value,
            operands.table,
            torch.tensor(operands.lengths, dtype=torch.int32),  # both lists of lengths stay on the host
            self.encode(operands.visible, query.dtype).view(batch * rows, -1),
            torch.full((batch,), rows, dtype=torch.int32),
            operands.key.shape[2],
            heads,
            scaling,
            out,
        )
        return out.view(batch, rows, heads, dim).transpose(1, 2)

    def _operands_in_pages(self, columns: AttentionInputs, dim: int) -> Operands:
        """The operands in pages that the operator reads: the cache's own pages where they fit, otherwise copies."""
        paging = columns.paging
        # Rule sf.block: the block size is a multiple of 16, and block size times head dimension is limited.
        if paging is not None and paging.size % 16 == 0 and paging.size * dim <= ROOM:
            return self.pages(columns)
        # Head dimensions above 128 halve the block, to stay within ROOM.
        return pack_into_pages(self.columns(columns), BLOCK if dim * BLOCK <= ROOM else BLOCK // 2)
