"""Faults of calls to Ascend's attention: ATB's, fused, and over latent rows.

The operators accept wrong arguments (scale, heads, lengths, layout, block table, mask) without an error.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specverify.backends.ascend.atb import AscendAtb
from specverify.backends.ascend.encodings import additive, compressed_mask
from specverify.backends.ascend.fused import ALIGNMENT, AscendFused, FusedCall
from specverify.backends.ascend.latent import LatentCall
from specverify.backends.ascend.operands import Operands
from specverify.backends.ascend.operators.fused_infer.latent import LATENT_DIM, ROPE_DIM
from specverify.backends.base import Unsupported
from specverify.backends.engine.columns import AttentionInputs
from specverify.backends.engine.kv.lanes import BatchCache
from specverify.backends.engine.kv.paged import Paged
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import Plant, attended_fault, in_place_of, on_result_of

ON = "ascend-fused-emulated"
"""The backend in which the faults of Ascend's fused attention are planted by default."""

REFUSAL = f"a fault of calls to Ascend's fused attention: plant it in ascend-fused or {ON}"

UNLIKE = "torch_npu docs, npu_fused_infer_attention_score"
"""The operator's documentation page, the source of several faults."""

ascend_fault = partial(attended_fault, on=ON)

in_encoding = in_place_of("attend.encode", AscendFused, REFUSAL)
"""A decorator for the function that makes the mask of a call."""

on_call = on_result_of("attend.ask", AscendFused, REFUSAL)
"""A decorator for a function that changes a call."""


def fused_attention(seams: Seams) -> AscendFused:
    """The Ascend fused attention of the seams.

    Raises:
        Unsupported: where the seams have another attention.
    """
    if not isinstance(seams.attend, AscendFused):
        raise Unsupported(REFUSAL)
    return seams.attend


def on_operands(change: Callable[[Operands, AttentionInputs], Operands]) -> Plant:
    """A decorator for a function that changes the operands of a call, in pages or gathered."""

    def plant(seams: Seams) -> Seams:
        attend = fused_attention(seams)
        changed = replace(
            attend,
            pages=lambda columns: change(attend.pages(columns), columns),
            columns=lambda columns: change(attend.columns(columns), columns),
        )
        return replace(seams, attend=changed)

    plant.__doc__ = change.__doc__
    return plant


def on_columns(change: Callable[[AttentionInputs], AttentionInputs]) -> Plant:
    """A decorator for a function that changes the inputs of which operands are made, in pages or gathered."""

    def plant(seams: Seams) -> Seams:
        attend = fused_attention(seams)
        changed = replace(
            attend,
            pages=lambda columns: attend.pages(change(columns)),
            columns=lambda columns: attend.columns(change(columns)),
        )
        return replace(seams, attend=changed)

    plant.__doc__ = change.__doc__
    return plant


ATB = "ascend-fused-atb-emulated"
"""The backend in which the faults of ATB's attention are planted by default."""

in_atb_encoding = in_place_of(
    "attend.encode", AscendAtb, f"a fault of calls to ATB's paged attention: plant it in ascend-fused-atb or {ATB}"
)
"""A decorator for the function that makes the mask of a call."""


@attended_fault(
    "ascend-padding-slot-negative",
    "vllm-ascend PR #17214; catalogue BZ-049: padded rows point to a live slot",
    "pages, and a batch of unequal trees",
    on=ON,
)
def padding_before_the_cache(seams: Seams) -> Seams:
    """Padding rows are written to slot -1, which lies before the cache: the operator checks no slot."""
    # For its check only: the fault calls an Ascend operator, which needs an Ascend backend.
    fused_attention(seams)

    class NegativeSlots(BatchCache):
        def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
            for lane, (cache, rows) in enumerate(zip(self.caches, self.rows, strict=True)):
                # A lane with fewer rows than the widest has padding rows, which the engine never writes.
                if rows < self.width and isinstance(cache, Paged):
                    keys, values = (states[lane, :, -1:].transpose(0, 1) for states in (key_states, value_states))
                    slot = torch.tensor([-1], dtype=torch.int32, device=keys.device)
                    pools = cache.pool.layers[layer_idx]
                    torch.ops.npu.npu_scatter_pa_kv_cache(
                        keys.contiguous(), values.contiguous(), *pools, slot, cache_mode="Norm"
                    )
            return super().update(key_states, value_states, layer_idx)

    return replace(seams, kv=replace(seams.kv, lanes=NegativeSlots))


@attended_fault("ascend-boolean-mask-added", "ATB documentation, PagedAttention, mask type SPEC", "any", on=ATB)
@in_atb_encoding
def boolean_mask_added(attend: AscendAtb, visible: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask of 0 and 1 is handed to the operator that adds it to the scores."""
    return (~visible).to(dtype)


@attended_fault("ascend-additive-mask-inverted", "ATB documentation, PagedAttention, mask type SPEC", "any", on=ATB)
@in_atb_encoding
def additive_mask_inverted(attend: AscendAtb, visible: Tensor, dtype: torch.dtype) -> Tensor:
    """The additive mask hides what is visible."""
    return additive(~visible, dtype)


@ascend_fault("ascend-default-scale", UNLIKE, "any")
@on_call
def scale_left_out(call: FusedCall) -> FusedCall:
    """The scale is left out: the operator's default is 1, not 1 / sqrt(D)."""
    return replace(call, scale=1.0)


@ascend_fault("ascend-scale-of-filled-head", UNLIKE + ": D must be a multiple of 16", "a head dimension that is none")
@on_call
def scale_of_filled_head(call: FusedCall) -> FusedCall:
    """The scale is taken from the head dimension after it was filled to a multiple of 16."""
    filled_dim = call.query.shape[-1] + -call.query.shape[-1] % ALIGNMENT
    return replace(call, scale=float(filled_dim**-0.5))


@ascend_fault("ascend-kv-heads-left-out", UNLIKE, "grouped queries, in a dtype that fused-infer attention takes")
@on_call
def kv_heads_left_out(call: FusedCall) -> FusedCall:
    """num_key_value_heads is left at 0, which means as many as query heads."""
    return replace(call, kv_heads=0)


@ascend_fault("ascend-rows-before-heads", UNLIKE + ", input_layout", "two heads and two rows")
@on_call
def rows_before_heads(call: FusedCall) -> FusedCall:
    """The query lies in memory as BSND and is called BNSD."""
    return replace(call, query=call.query.transpose(1, 2).reshape(call.query.shape))


@ascend_fault(
    "ascend-kv-heads-in-turn",
    "torch_npu, npu_fused_infer_attention_score: groups of num_heads / num_key_value_heads neighbours",
    "two KV heads, more query heads",
)
@on_call
def kv_heads_in_turn(call: FusedCall) -> FusedCall:
    """Query heads take KV heads in turn instead of in groups."""
    operands = call.operands
    axis = 1 if call.operands.table is None else 2
    turn = torch.arange(call.heads, device=operands.key.device) % call.kv_heads
    # KV heads are repeated in the wrong order, so that the call has one for each query head.
    key, value = (tensor.index_select(axis, turn) for tensor in (operands.key, operands.value))
    return replace(call, operands=replace(operands, key=key, value=value), kv_heads=call.heads)


@ascend_fault("ascend-next-tokens-0", "torch_npu docs, npu_prompt_flash_attention", "a context")
@on_call
def next_tokens_zero(call: FusedCall) -> FusedCall:
    """next_tokens is 0, the default of the operator's predecessor: a band from the top left hides all beyond it."""
    return replace(call, next_tokens=0)


@ascend_fault(
    "ascend-lengths-short-of-tree", "catalogue BZ-147: the attention mask is shorter than the keys", "a context"
)
@on_operands
def short_of_tree(operands: Operands, columns: AttentionInputs) -> Operands:
    """The key lengths are those of the committed cache: the rows of the tree lie behind its end."""
    # A lane without a prefix would have no key at all.
    if not bool(operands.prefix.all()):
        return operands
    lengths = [
        min(int(prefix_length), length) for prefix_length, length in zip(operands.prefix, operands.lengths, strict=True)
    ]
    if operands.table is not None:
        return replace(operands, lengths=lengths)
    end = max(lengths)
    return replace(
        operands,
        key=operands.key[:, :, :end].contiguous(),
        value=operands.value[:, :, :end].contiguous(),
        visible=operands.visible[..., :end],
        lengths=lengths,
    )


@ascend_fault(
    "ascend-table-of-next-request",
    "catalogue BZ-033: attention reads through wrong page indices",
    "pages, and a batch of two",
)
@on_columns
def next_requests_table(columns: AttentionInputs) -> AttentionInputs:
    """The block table of the next request of the batch is read."""
    paging = columns.paging
    return columns if paging is None else replace(columns, paging=replace(paging, table=paging.table.roll(-1, 0)))


V2 = "torch_npu docs, npu_fused_infer_attention_score_v2"
"""The documentation page of the operator."""

ROWS = "latent rows in 16 bits, "
"""The part of a trigger that every fault here needs."""

on_latent_call = on_result_of("attend.ask_latent", AscendFused, REFUSAL)
"""A decorator for a function that changes a call over latent rows."""


@ascend_fault(
    "ascend-latent-mask-transposed", V2 + ": (B, Q_S, Q_S), two axes of one size", ROWS + "a tree of two nodes"
)
@on_latent_call
def mask_by_columns(call: LatentCall) -> LatentCall:
    """The mask of sparse mode 9 has a node's descendants where its ancestors belong."""
    return call if call.mask is None else replace(call, mask=call.mask.transpose(1, 2).contiguous())


@ascend_fault(
    "ascend-latent-sparse-mode-3",
    "family of vllm-ascend PR #8408: a tree under the mask of a chain",
    ROWS + "two branches",
)
@on_latent_call
def chain(call: LatentCall) -> LatentCall:
    """Latent rows of a tree are verified under sparse mode 3, the chain's: siblings see each other."""
    return call if call.mask is None else replace(call, mask=compressed_mask(call.query.device), sparse_mode=3)


@ascend_fault(
    "ascend-latent-rope-of-column-before",
    V2 + ": key and key_rope are two tensors with slots of their own",
    ROWS + "two columns",
)
@on_latent_call
def parts_of_column_before(call: LatentCall) -> LatentCall:
    """key_rope is shifted by one column against the key: a node has the rotated part of the row before."""
    return replace(call, key_rope=call.key_rope.roll(1, 2 if call.table is None else 1))


@ascend_fault(
    "ascend-latent-scale-of-row",
    V2 + ": softmax_scale; DeepSeek-V2, arXiv 2405.04434, section 2.1.2",
    ROWS + "a context",
)
@on_latent_call
def scale_of_row(call: LatentCall) -> LatentCall:
    """The scale is taken from the width of a latent row, not from that of the model's heads."""
    return replace(call, scale=float((LATENT_DIM + ROPE_DIM) ** -0.5))


PANGU = "modular_openpangu_dense.py of openPangu-Embedded"
"""The model file of openPangu whose mask handling two faults copy."""


def _causal(call: FusedCall, sparse_mode: int) -> FusedCall:
    """The compressed causal mask in place of the tree's, where there are several rows."""
    # The sparse mode has an effect with several rows only.
    if call.mask is None or call.query.shape[2] == 1:
        return call
    return replace(call, mask=compressed_mask(call.query.device), sparse_mode=sparse_mode)


@ascend_fault("ascend-mask-inverted", "example 3 of the operator's own page; kernel source has 1 = masked", "any")
@in_encoding
def keep_for_mask(attend: AscendFused, visible: Tensor) -> Tensor:
    """The boolean mask says what is visible, where the operator wants what is masked."""
    return visible.contiguous()


@ascend_fault("ascend-additive-mask-as-boolean", PANGU, "any")
@in_encoding
def negated_additive(attend: AscendFused, visible: Tensor) -> Tensor:
    """A mask that is added is turned into a boolean and negated: 0, which was visible, is masked."""
    return ~additive(visible, torch.float32).bool()


@ascend_fault(
    "ascend-sparse-mode-2",
    PANGU + ": the branch without a mask; catalogue BZ-148",
    "a tree of two nodes over a context",
)
@on_call
def causal_from_top_left(call: FusedCall) -> FusedCall:
    """The tree is verified under sparse mode 2, causal from the top left: it ignores the cached prefix."""
    return _causal(call, 2)


@ascend_fault(
    "ascend-sparse-mode-3",
    "vllm-ascend PR #8408; catalogue BZ-145: the tree mask is not looked at below the diagonal",
    "two branches",
)
@on_call
def causal_to_bottom_right(call: FusedCall) -> FusedCall:
    """The tree is verified under sparse mode 3, causal to the bottom right: siblings see each other."""
    return _causal(call, 3)


@ascend_fault(
    "ascend-one-row-mask-ignored",
    "vllm-ascend issue #15503",
    "a single row that does not see its whole lane: a window, or a mate with a longer one",
)
@in_encoding
def one_row_ignored(attend: AscendFused, visible: Tensor) -> Tensor:
    """The mask of a single query row is ignored past a column."""
    mask = (~visible).contiguous()
    # `AscendFused` passes a single row twice, so two equal rows are a single one. Here the bound is column 3; the
    # public report is about column 512, beyond most drawn prompts.
    if visible.shape[2] == 1 or (visible.shape[2] == 2 and torch.equal(visible[:, :, 0], visible[:, :, 1])):
        mask[..., 3:] = False
    return mask


@ascend_fault(
    "ascend-mask-row-offset",
    "ops-transformer, prompt_flash_attention_base.h: mask offsets of a tile",
    "more than four rows",
)
@in_encoding
def first_tile(attend: AscendFused, visible: Tensor) -> Tensor:
    """Every tile of query rows reads the mask rows of the first tile."""
    rows = torch.arange(visible.shape[2], device=visible.device) % 4
    return (~visible[:, :, rows]).contiguous()


@ascend_fault(
    "ascend-mask-with-head-axis",
    "ops-transformer, prompt_flash_attention_base.h:1162-1169; catalogue BZ-136: lane 0 stands for all",
    "a batch of two",
)
@on_call
def heads_step_over_lanes(call: FusedCall) -> FusedCall:
    """The mask has a head axis, over which the kernel steps as if it were the batch."""
    if call.mask is None:
        return call
    lanes = len(call.mask)
    return replace(call, mask=call.mask.repeat_interleave(call.heads, 0)[:lanes].contiguous())


@ascend_fault(
    "ascend-mask-without-prefix",
    "family of catalogue BZ-092: the offset of the custom mask",
    "two branches over a context",
)
@on_operands
def mask_without_prefix(operands: Operands, columns: AttentionInputs) -> Operands:
    """The tree's part of the mask stands at column 0, the prefix behind it."""
    moved_mask = operands.visible.clone()
    for lane, prefix in enumerate(operands.prefix.tolist()):
        end = operands.lengths[lane]
        # Rolled inside the lane's own length, so that the cells behind it stay hidden.
        moved_mask[lane, ..., :end] = operands.visible[lane, ..., :end].roll(-prefix, -1)
    return replace(operands, visible=moved_mask)


@ascend_fault(
    "ascend-mask-tail-visible",
    "catalogue BZ-097: lanes beyond the last key stay in the softmax",
    "cells behind the tree: pages, or a static buffer",
)
@on_columns
def tail_seen(columns: AttentionInputs) -> AttentionInputs:
    """The mask is filled to the width of the block table with zeros, which mean visible."""
    paging = columns.paging
    visible = columns.visible
    if paging is not None:
        width = paging.table.shape[1] * paging.size
        visible = torch.nn.functional.pad(visible, (0, max(0, width - visible.shape[-1])))
        end = paging.lengths.clone()
        columns = replace(columns, paging=replace(paging, lengths=torch.full_like(end, width)))
    else:
        # A gathered lane has no stated length: the tail is all that follows its last visible column.
        end = torch.tensor([int(rows.any(0).nonzero().max()) + 1 for rows in visible[:, 0]])
    tail = torch.arange(visible.shape[-1])[None] >= end.cpu()[:, None]
    return replace(columns, visible=visible | tail[:, None, None].to(visible.device))
