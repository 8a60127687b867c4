"""The attention of ascend-fused: tree attention by fused-infer attention.

The call uses layout BNSD with a full boolean mask, and reads pages in place where the operator can.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specverify.backends.ascend.eager import ascend_eager
from specverify.backends.ascend.encodings import boolean
from specverify.backends.ascend.latent import LatentCall, ask_latent, can_take, infer_latent, tree_visibility
from specverify.backends.ascend.operands import (
    BLOCK,
    LARGEST_BLOCK,
    Operands,
    gather_columns,
    operands_in_pages,
    with_equal_widths,
)
from specverify.backends.ascend.operators.masked import WIDE_OPEN
from specverify.backends.ascend.operators.versions import takes
from specverify.backends.engine.columns import Attend, AttentionInputs

ALIGNMENT = 16
"""The multiple of which fused-infer attention takes head dimensions."""

LATENT_BLOCK = 16
"""The multiple of which it takes blocks of latent rows."""


@dataclass(frozen=True)
class FusedCall:
    """The arguments of one call, for either of the two operators.

    Attributes:
        query: [B, N, T, D], contiguous.
        operands: Keys, values and lengths; `mask` expresses their `visible`.
        mask: bool, True = masked, [B, 1, T, C]; None where every row sees all columns of its lane.
        heads: N, the number of query heads.
        kv_heads: The number of KV heads; the operator reads 0 as N.
        scale: The factor of the scores; the operator's own default is 1.
        layout: The order of the axes.
        sparse_mode: 0, which makes the mask alone decide.
        next_tokens: How many columns right of the diagonal the band of mode 0 keeps: all.
    """

    query: Tensor
    operands: Operands
    mask: Tensor | None
    heads: int
    kv_heads: int
    scale: float
    layout: str = "BNSD"
    sparse_mode: int = 0
    next_tokens: int = WIDE_OPEN


def ask(query: Tensor, operands: Operands, mask: Tensor | None, scaling: float) -> FusedCall:
    """The call that computes attention of `query` over `operands` under `mask`."""
    # Gathered keys are [B, Hkv, C, D], pages are [pages, size, Hkv, D].
    kv_heads = operands.key.shape[1 if operands.table is None else 2]
    return FusedCall(query.contiguous(), operands, mask, query.shape[1], kv_heads, scaling)


def infer(call: FusedCall) -> Tensor:
    """Run npu_fused_infer_attention_score, which takes float16 and bfloat16."""
    operands = call.operands
    dim = call.query.shape[-1]
    query, key, value = (_pad_to_alignment(tensor) for tensor in (call.query, operands.key, operands.value))
    if operands.table is not None:
        # The operator reads a paged cache as [pages, size, Hkv * D].
        key, value = key.flatten(2), value.flatten(2)
    # inner_precise 2 zeroes fully masked rows; the kernel for one row takes only 0 and 1.
    several = query.shape[2] > 1
    out: Tensor = torch.ops.npu.npu_fused_infer_attention_score(
        query,
        key,
        value,
        atten_mask=call.mask,
        actual_seq_lengths_kv=operands.lengths,
        block_table=operands.table,
        block_size=operands.size,
        num_heads=call.heads,
        num_key_value_heads=call.kv_heads,
        scale=call.scale,
        input_layout=call.layout,
        sparse_mode=call.sparse_mode,
        next_tokens=call.next_tokens,
        inner_precise=2 if several else 0,
    )[0]
    # Without the zeros that `_pad_to_alignment` has filled in.
    return out[..., :dim]


def fusion(call: FusedCall) -> Tensor:
    """Run npu_fusion_attention, which also takes float32 and wants a mask of exactly the size of the scores."""
    operands = call.operands
    out: Tensor = torch.ops.npu.npu_fusion_attention(
        call.query,
        operands.key,
        operands.value,
        call.heads,
        call.layout,
        atten_mask=call.mask,
        scale=call.scale,
        next_tockens=call.next_tokens,
        sparse_mode=call.sparse_mode,
    )[0]
    return out


def _pad_to_alignment(tensor: Tensor) -> Tensor:
    """`tensor`, its last axis filled with zeros to a multiple of 16; zeros change no score and no output."""
    spare = -tensor.shape[-1] % ALIGNMENT
    return torch.nn.functional.pad(tensor, (0, spare)) if spare else tensor


def sees_whole_lanes(visible: Tensor, lengths: list[int]) -> bool:
    """Whether every row sees its lane from the first column to the lane's last seen column."""
    num_visible = visible.sum(-1).flatten(1)
    return bool((num_visible == torch.tensor(lengths, device=num_visible.device)[:, None]).all())


@dataclass(frozen=True)
class AscendFused:
    """Attention by the fused operators, the same code on a device and on the emulation.

    A query of one row goes to a kernel that ignores its mask past 512 columns (vllm-ascend issue 15503). Where such a
    row sees its whole lane, the call has no mask; elsewhere the row is passed twice, which selects the other kernel.
    Fused-infer attention does not take float32, so float32 goes to fusion attention. Other head dimensions are filled
    with zeros, and columns in pages of other sizes are gathered first. So are columns whose keys and values differ in
    width; the narrower are filled with zeros. Latent rows go to version 2 of fused-infer attention (`latent.py`) where
    it takes them; others are rows of one KV head. None of these is a fallback, because a fused operator computes each
    of them. A call that falls back to `eager` is announced.

    Attributes:
        pages: Makes operands of columns that lie in pages.
        columns: Makes operands of gathered columns.
        encode: Makes the operators' mask from the rows' visible columns.
        ask: Makes a call from query, operands, mask and scale.
        needs_no_mask: Whether a query of one row needs no mask.
        ask_latent: Makes a call over latent rows from query, operands, mask of the tree and scale.
        eager: The attention that takes over where the operators cannot run, and in mode `reference`.
    """

    pages: Callable[[AttentionInputs], Operands] = operands_in_pages
    columns: Callable[[AttentionInputs], Operands] = gather_columns
    encode: Callable[[Tensor], Tensor] = boolean
    ask: Callable[[Tensor, Operands, Tensor | None, float], FusedCall] = ask
    needs_no_mask: Callable[[Tensor, list[int]], bool] = sees_whole_lanes
    ask_latent: Callable[[Tensor, Operands, Tensor | None, float], LatentCall] = ask_latent
    eager: Attend = ascend_eager

    def __call__(self, query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
        """See `columns.Attend`."""
        columns.refuse_cap("Ascend's fused attention")
        columns.refuse_indexed("Ascend's fused attention")
        columns.refuse_sinks("Ascend's fused attention")
        if columns.latent and query.dtype != torch.float32 and takes("npu_fused_infer_attention_score_v2"):
            operands = self._place(columns, LATENT_BLOCK)
            rows = query.shape[2]
            if can_take(query, operands):
                mask = self.encode(tree_visibility(operands, rows))[:, 0] if rows > 1 else None
                return infer_latent(self.ask_latent(query, operands, mask, scaling))
        why = _unfit(query, columns)
        if why is not None:
            columns.announce(f"eager: {why}")
            return self.eager(query, columns, scaling)
        values = columns.value.shape[-1]
        if columns.key.shape[-1] != values:
            query, operands = with_equal_widths(query, self.columns(columns))
        elif query.dtype == torch.float32:
            # Fusion attention reads no pages, so the columns are gathered.
            operands = self.columns(columns)
        else:
            operands = self._place(columns, BLOCK)
        return self._attend_by_heads(query, operands, scaling)[..., :values]

    def _attend_by_heads(self, query: Tensor, operands: Operands, scaling: float) -> Tensor:
        """Attention over keys and values of one width, by the operator for the query's dtype."""
        if query.dtype == torch.float32:
            return fusion(self.ask(query, operands, self.encode(operands.visible), scaling))
        rows = query.shape[2]
        if rows > 1:
            return infer(self.ask(query, operands, self.encode(operands.visible), scaling))
        if self.needs_no_mask(operands.visible, operands.lengths):
            return infer(self.ask(query, operands, None, scaling))
        # Two equal rows select the kernel that reads the whole mask; the second result is dropped.
        operands = replace(operands, visible=operands.visible.repeat(1, 1, 2, 1))
        twice = query.repeat(1, 1, 2, 1)
        return infer(self.ask(twice, operands, self.encode(operands.visible), scaling))[:, :, :1]

    def _place(self, columns: AttentionInputs, block: int) -> Operands:
        """The operands in their pages where these hold a multiple of `block` columns, otherwise gathered."""
        paging = columns.paging
        if paging is None:
            return self.columns(columns)
        if paging.size % block or paging.size > LARGEST_BLOCK:
            return self.columns(columns)
        return self.pages(columns)


def _unfit(query: Tensor, columns: AttentionInputs) -> str | None:
    """The reason why no fused operator takes this query, or None."""
    groups = query.shape[1] // columns.key.shape[1]
    if query.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"no fused operator takes {query.dtype}"
    # Rules fia.head-dim-512 and fia.gqa.
    dim = max(query.shape[-1], columns.value.shape[-1])
    if dim > 512:
        return f"head dimension {dim}, at most 512"
    if groups > 64:
        return f"{groups} query heads on one KV head, at most 64"
    return None
