"""ascend-fused-atb: tree attention by ATB's splitfuse, a ragged batch over pages under an additive mask."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from backends.ascend.eager import ascend_eager
from backends.ascend.encodings import additive
from backends.ascend.operands import BLOCK, Operands, gathered, in_pages, packed
from backends.engine.columns import Attend, AttentionInputs

ROOM = 128 * 128
"""Numbers of one head that a block may hold."""

LARGEST_HEAD = 256


@dataclass(frozen=True)
class AscendAtb:
    """Attention by `_npu_paged_attention_splitfuse`, identical on a device with NNAL and emulated.

    Columns that lie in no pages, or in pages that it does not read, are copied into such; what goes to `eager` is
    announced.

    Attributes:
        pages: Columns in their pages, to operands.
        columns: Columns to operands that are gathered, to be packed into pages.
        encode: What rows see and the query's dtype, to the additive mask.
        eager: What takes over where the operator cannot, and in mode `reference`.
    """

    pages: Callable[[AttentionInputs], Operands] = in_pages
    columns: Callable[[AttentionInputs], Operands] = gathered
    encode: Callable[[Tensor, torch.dtype], Tensor] = additive
    eager: Attend = ascend_eager

    def __call__(self, query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
        """See `columns.Attend`."""
        columns.refuse_cap("ATB's splitfuse attention")
        if query.shape[-1] > LARGEST_HEAD or query.dtype not in (torch.float16, torch.bfloat16):
            columns.announce(f"eager: {query.dtype} with head dimension {query.shape[-1]} is nothing for splitfuse")
            return self.eager(query, columns, scaling)
        held = self._paged(columns, query.shape[-1])
        assert held.table is not None
        batch, heads, rows, dim = query.shape
        tokens = query.transpose(1, 2).reshape(batch * rows, heads, dim).contiguous()
        out = torch.empty_like(tokens)
        torch.ops.atb._npu_paged_attention_splitfuse(
            tokens,
            held.key,
            held.value,
            held.table,
            torch.tensor(held.lengths, dtype=torch.int32),  # both lists of lengths stay on the host
            self.encode(held.visible, query.dtype).view(batch * rows, -1),
            torch.full((batch,), rows, dtype=torch.int32),
            held.key.shape[2],
            heads,
            scaling,
            out,
        )
        return out.view(batch, rows, heads, dim).transpose(1, 2)

    def _paged(self, columns: AttentionInputs, dim: int) -> Operands:
        paging = columns.paging
        if paging is not None and paging.size % 16 == 0 and paging.size * dim <= ROOM:
            return self.pages(columns)
        return packed(self.columns(columns), BLOCK if dim * BLOCK <= ROOM else BLOCK // 2)
