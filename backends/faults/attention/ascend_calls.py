"""Faults of calls to Ascend's fused attention.

An engine passes wrong arguments (scale, heads, lengths, layout, block table) that the operator accepts without an
error.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from specverify.backends.ascend.fused import ALIGNMENT, AscendFused, FusedCall
from specverify.backends.ascend.operands import Operands
from specverify.backends.base import Unsupported
from specverify.backends.engine.columns import AttentionInputs
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import Plant, attended_fault, faults_in, in_place_of, on_result_of

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


FAULTS = faults_in(globals())
