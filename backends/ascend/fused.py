"""The attention of ascend-fused: tree attention by fused-infer attention.

The call uses layout BNSD with a full boolean mask, and reads pages in place where the operator can.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from backends.ascend.eager import ascend_eager
from backends.ascend.encodings import boolean
from backends.ascend.latent import LatentAsked, ask_latent, infer_latent, of_tree, takes
from backends.ascend.operands import BLOCK, LARGEST_BLOCK, Operands, equally_wide, gathered, in_pages
from backends.ascend.operators.masked import WIDE_OPEN
from backends.engine.columns import Attend, AttentionInputs

ALIGNED = 16
"""The multiple of which fused-infer attention takes head dimensions."""

LATENT_BLOCK = 16
"""The multiple of which it takes blocks of latent rows."""


@dataclass(frozen=True)
class Asked:
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


def ask(query: Tensor, operands: Operands, mask: Tensor | None, scaling: float) -> Asked:
    """The call that computes attention of `query` over `operands` under `mask`."""
    # Gathered keys are [B, Hkv, C, D], pages are [pages, size, Hkv, D].
    kv_heads = operands.key.shape[1 if operands.table is None else 2]
    return Asked(query.contiguous(), operands, mask, query.shape[1], kv_heads, scaling)


def infer(asked: Asked) -> Tensor:
    """Run npu_fused_infer_attention_score, which takes float16 and bfloat16."""
    held, dim = asked.operands, asked.query.shape[-1]
    query, key, value = (_aligned(one) for one in (asked.query, held.key, held.value))
    if held.table is not None:
        # The operator reads a paged cache as [pages, size, Hkv * D].
        key, value = key.flatten(2), value.flatten(2)
    # inner_precise 2 zeroes fully masked rows; the kernel for one row takes only 0 and 1.
    several = query.shape[2] > 1
    out: Tensor = torch.ops.npu.npu_fused_infer_attention_score(
        query,
        key,
        value,
        atten_mask=asked.mask,
        actual_seq_lengths_kv=held.lengths,
        block_table=held.table,
        block_size=held.size,
        num_heads=asked.heads,
        num_key_value_heads=asked.kv_heads,
        scale=asked.scale,
        input_layout=asked.layout,
        sparse_mode=asked.sparse_mode,
        next_tokens=asked.next_tokens,
        inner_precise=2 if several else 0,
    )[0]
    # Without the zeros that `_aligned` has filled in.
    return out[..., :dim]


def fusion(asked: Asked) -> Tensor:
    """Run npu_fusion_attention, which also takes float32 and wants a mask of exactly the size of the scores."""
    held = asked.operands
    out: Tensor = torch.ops.npu.npu_fusion_attention(
        asked.query,
        held.key,
        held.value,
        asked.heads,
        asked.layout,
        atten_mask=asked.mask,
        scale=asked.scale,
        next_tockens=asked.next_tokens,
        sparse_mode=asked.sparse_mode,
    )[0]
    return out


def _aligned(tensor: Tensor) -> Tensor:
    """`tensor`, its last axis filled with zeros to a multiple of 16; zeros change no score and no output."""
    spare = -tensor.shape[-1] % ALIGNED
    return torch.nn.functional.pad(tensor, (0, spare)) if spare else tensor


def whole(visible: Tensor, lengths: list[int]) -> bool:
    """Whether every row sees its lane from the first column to the lane's last seen column."""
    seen = visible.sum(-1).flatten(1)
    return bool((seen == torch.tensor(lengths, device=seen.device)[:, None]).all())


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
        unmasked: Whether a query of one row needs no mask.
        ask_latent: Makes a call over latent rows from query, operands, mask of the tree and scale.
        eager: The attention that takes over where the operators cannot run, and in mode `reference`.
    """

    pages: Callable[[AttentionInputs], Operands] = in_pages
    columns: Callable[[AttentionInputs], Operands] = gathered
    encode: Callable[[Tensor], Tensor] = boolean
    ask: Callable[[Tensor, Operands, Tensor | None, float], Asked] = ask
    unmasked: Callable[[Tensor, list[int]], bool] = whole
    ask_latent: Callable[[Tensor, Operands, Tensor | None, float], LatentAsked] = ask_latent
    eager: Attend = ascend_eager

    def __call__(self, query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
        """See `columns.Attend`."""
        columns.refuse_cap("Ascend's fused attention")
        columns.refuse_sinks("Ascend's fused attention")
        if columns.latent and query.dtype != torch.float32:
            held, rows = self._placed(columns, LATENT_BLOCK), query.shape[2]
            if takes(query, held):
                mask = self.encode(of_tree(held, rows))[:, 0] if rows > 1 else None
                return infer_latent(self.ask_latent(query, held, mask, scaling))
        why = _unfit(query, columns)
        if why is not None:
            columns.announce(f"eager: {why}")
            return self.eager(query, columns, scaling)
        values = columns.value.shape[-1]
        if columns.key.shape[-1] != values:
            query, held = equally_wide(query, self.columns(columns))
        elif query.dtype == torch.float32:
            # Fusion attention reads no pages, so the columns are gathered.
            held = self.columns(columns)
        else:
            held = self._placed(columns, BLOCK)
        return self._by_heads(query, held, scaling)[..., :values]

    def _by_heads(self, query: Tensor, held: Operands, scaling: float) -> Tensor:
        """Attention over keys and values of one width, by the operator for the query's dtype."""
        if query.dtype == torch.float32:
            return fusion(self.ask(query, held, self.encode(held.visible), scaling))
        rows = query.shape[2]
        if rows > 1:
            return infer(self.ask(query, held, self.encode(held.visible), scaling))
        if self.unmasked(held.visible, held.lengths):
            return infer(self.ask(query, held, None, scaling))
        # Two equal rows select the kernel that reads the whole mask; the second result is dropped.
        held = replace(held, visible=held.visible.repeat(1, 1, 2, 1))
        twice = query.repeat(1, 1, 2, 1)
        return infer(self.ask(twice, held, self.encode(held.visible), scaling))[:, :, :1]

    def _placed(self, columns: AttentionInputs, block: int) -> Operands:
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
