"""Faults of the masks that are passed to Ascend's fused attention.

The operator accepts a wrong mask without an error, or does not read the mask.
"""

from dataclasses import replace

import torch
from torch import Tensor

from specverify.backends.ascend.encodings import additive, compressed_mask
from specverify.backends.ascend.fused import AscendFused, FusedCall
from specverify.backends.ascend.operands import Operands
from specverify.backends.engine.columns import AttentionInputs
from specverify.backends.faults.attention.ascend_calls import (
    ascend_fault,
    in_encoding,
    on_call,
    on_columns,
    on_operands,
)
from specverify.backends.faults.fault import faults_in

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


FAULTS = faults_in(globals())
