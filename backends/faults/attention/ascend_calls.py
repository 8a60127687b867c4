"""Faults of calls to Ascend's fused attention.

An engine passes wrong arguments (scale, heads, lengths, layout, block table) that the operator accepts without an
error.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from specverify.backends.ascend.fused import ALIGNMENT, AscendFused, FusedCall
from specverify.backends.ascend.operands import Operands
from specverify.backends.base import Unsupported
from specverify.backends.engine.columns import AttentionInputs
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import Fault
from specverify.reference.trace import Stage

ON = "ascend-fused-emulated"
"""The backend in which the faults of Ascend's fused attention are planted by default."""


def fused_attention(seams: Seams) -> AscendFused:
    """The Ascend fused attention of the seams.

    Raises:
        Unsupported: where the seams have another attention.
    """
    if not isinstance(seams.attend, AscendFused):
        raise Unsupported(f"a fault of calls to Ascend's fused attention: plant it in ascend-fused or {ON}")
    return seams.attend


def with_encoding(encode: Callable[[Tensor], Tensor]) -> Callable[[Seams], Seams]:
    """A fault whose calls get the mask that `encode` makes."""

    def plant(seams: Seams) -> Seams:
        return replace(seams, attend=replace(fused_attention(seams), encode=encode))

    return plant


def with_changed_calls(change: Callable[[FusedCall], FusedCall]) -> Callable[[Seams], Seams]:
    """A fault whose calls are changed by `change`."""

    def plant(seams: Seams) -> Seams:
        right = fused_attention(seams).ask

        def ask(query: Tensor, operands: Operands, mask: Tensor | None, scaling: float) -> FusedCall:
            return change(right(query, operands, mask, scaling))

        return replace(seams, attend=replace(fused_attention(seams), ask=ask))

    return plant


def with_changed_operands(change: Callable[[Operands, AttentionInputs], Operands]) -> Callable[[Seams], Seams]:
    """A fault whose operands, in pages or gathered, are changed by `change`."""

    def plant(seams: Seams) -> Seams:
        attend = fused_attention(seams)

        def pages(columns: AttentionInputs) -> Operands:
            return change(attend.pages(columns), columns)

        def gather(columns: AttentionInputs) -> Operands:
            return change(attend.columns(columns), columns)

        return replace(seams, attend=replace(attend, pages=pages, columns=gather))

    return plant


def _scale_of_filled_head(call: FusedCall) -> FusedCall:
    """The scale of the head dimension after it was filled to a multiple of 16."""
    filled_dim = call.query.shape[-1] + -call.query.shape[-1] % ALIGNMENT
    return replace(call, scale=float(filled_dim**-0.5))


def _rows_before_heads(call: FusedCall) -> FusedCall:
    """The query's memory in the order [B, T, N, D] under the shape [B, N, T, D]."""
    return replace(call, query=call.query.transpose(1, 2).reshape(call.query.shape))


def _kv_heads_in_turn(call: FusedCall) -> FusedCall:
    """Query head h reads KV head h % kv_heads instead of h // group."""
    operands = call.operands
    axis = 1 if call.operands.table is None else 2
    turn = torch.arange(call.heads, device=operands.key.device) % call.kv_heads
    # KV heads are repeated in the wrong order, so that the call has one for each query head.
    key, value = (tensor.index_select(axis, turn) for tensor in (operands.key, operands.value))
    return replace(call, operands=replace(operands, key=key, value=value), kv_heads=call.heads)


def _short_of_tree(operands: Operands, columns: AttentionInputs) -> Operands:
    """The key length is that of the committed cache, so the operator ignores the rows of the tree behind it."""
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


def _next_requests_table(seams: Seams) -> Seams:
    """Lane b reads the block table of request b + 1 of the batch."""
    attend = fused_attention(seams)

    def turn_table(columns: AttentionInputs) -> AttentionInputs:
        paging = columns.paging
        return columns if paging is None else replace(columns, paging=replace(paging, table=paging.table.roll(-1, 0)))

    def pages(columns: AttentionInputs) -> Operands:
        return attend.pages(turn_table(columns))

    def gather(columns: AttentionInputs) -> Operands:
        return attend.columns(turn_table(columns))

    return replace(seams, attend=replace(attend, pages=pages, columns=gather))


def fault(name: str, sentence: str, source: str, trigger: str, plant: Callable[[Seams], Seams], on: str = ON) -> Fault:
    """A fault of an operator call, at stage attended."""
    return Fault(name, Stage.ATTENDED, sentence, source, trigger, plant, on=on)


UNLIKE = "torch_npu docs, npu_fused_infer_attention_score"
"""The operator's documentation page, the source of several faults."""

FAULTS = (
    fault(
        "ascend-default-scale",
        "The scale is left out: the operator's default is 1, not 1 / sqrt(D).",
        UNLIKE,
        "any",
        with_changed_calls(lambda call: replace(call, scale=1.0)),
    ),
    fault(
        "ascend-scale-of-filled-head",
        "The scale is taken from the head dimension after it was filled to a multiple of 16.",
        UNLIKE + ": D must be a multiple of 16",
        "a head dimension that is none",
        with_changed_calls(_scale_of_filled_head),
    ),
    fault(
        "ascend-kv-heads-left-out",
        "num_key_value_heads is left at 0, which means as many as query heads.",
        UNLIKE,
        "grouped queries, in a dtype that fused-infer attention takes",
        with_changed_calls(lambda call: replace(call, kv_heads=0)),
    ),
    fault(
        "ascend-rows-before-heads",
        "The query lies in memory as BSND and is called BNSD.",
        UNLIKE + ", input_layout",
        "two heads and two rows",
        with_changed_calls(_rows_before_heads),
    ),
    fault(
        "ascend-kv-heads-in-turn",
        "Query heads take KV heads in turn instead of in groups.",
        "torch_npu, npu_fused_infer_attention_score: groups of num_heads / num_key_value_heads neighbours",
        "two KV heads, more query heads",
        with_changed_calls(_kv_heads_in_turn),
    ),
    fault(
        "ascend-next-tokens-0",
        "next_tokens is 0, the default of the operator's predecessor: a band from the top left hides all beyond it.",
        "torch_npu docs, npu_prompt_flash_attention",
        "a context",
        with_changed_calls(lambda call: replace(call, next_tokens=0)),
    ),
    fault(
        "ascend-lengths-short-of-tree",
        "The key lengths are those of the committed cache: the rows of the tree lie behind its end.",
        "catalogue BZ-147: the attention mask is shorter than the keys",
        "a context",
        with_changed_operands(_short_of_tree),
    ),
    fault(
        "ascend-table-of-next-request",
        "The block table of the next request of the batch is read.",
        "catalogue BZ-033: attention reads through wrong page indices",
        "pages, and a batch of two",
        _next_requests_table,
    ),
)
