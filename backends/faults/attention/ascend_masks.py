"""Faults of the masks that are passed to Ascend's fused attention.

The operator accepts a wrong mask without an error, or does not read the mask.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from specverify.backends.ascend.encodings import additive, compressed_mask
from specverify.backends.ascend.fused import FusedCall
from specverify.backends.ascend.operands import Operands
from specverify.backends.engine.columns import AttentionInputs
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.attention.ascend_calls import (
    fault,
    fused_attention,
    with_changed_calls,
    with_changed_operands,
    with_encoding,
)


def keep_for_mask(visible: Tensor) -> Tensor:
    """The mask of the opposite polarity: True where a key is visible."""
    return visible.contiguous()


def negated_additive(visible: Tensor) -> Tensor:
    """The line `~attention_mask.bool()` of openPangu on an additive mask, in which 0 means visible."""
    return ~additive(visible, torch.float32).bool()


def one_row_ignored(visible: Tensor) -> Tensor:
    """The mask of a single row, which may be passed twice, hides nothing from the fourth column on."""
    mask = (~visible).contiguous()
    # `AscendFused` passes a single row twice, so two equal rows are a single one. Here the bound is column 3; the
    # public report is about column 512, beyond most drawn prompts.
    if visible.shape[2] == 1 or (visible.shape[2] == 2 and torch.equal(visible[:, :, 0], visible[:, :, 1])):
        mask[..., 3:] = False
    return mask


def first_tile(visible: Tensor) -> Tensor:
    """Tiles of four query rows, each under the mask rows of the first tile."""
    rows = torch.arange(visible.shape[2], device=visible.device) % 4
    return (~visible[:, :, rows]).contiguous()


def _causal(sparse_mode: int) -> Callable[[Seams], Seams]:
    """The compressed causal mask in place of the tree's, where there are several rows."""

    def change(call: FusedCall) -> FusedCall:
        # The sparse mode has an effect with several rows only.
        if call.mask is None or call.query.shape[2] == 1:
            return call
        return replace(call, mask=compressed_mask(call.query.device), sparse_mode=sparse_mode)

    return with_changed_calls(change)


def _heads_step_over_lanes(call: FusedCall) -> FusedCall:
    """A mask with a head axis, of which the kernel takes one Q x KV matrix after another as the lanes' masks."""
    if call.mask is None:
        return call
    lanes = len(call.mask)
    return replace(call, mask=call.mask.repeat_interleave(call.heads, 0)[:lanes].contiguous())


def _mask_without_prefix(operands: Operands, columns: AttentionInputs) -> Operands:
    """The mask with the block's columns at column 0, and the prefix's columns behind them."""
    moved_mask = operands.visible.clone()
    for lane, prefix in enumerate(operands.prefix.tolist()):
        end = operands.lengths[lane]
        # Rolled inside the lane's own length, so that the cells behind it stay hidden.
        moved_mask[lane, ..., :end] = operands.visible[lane, ..., :end].roll(-prefix, -1)
    return replace(operands, visible=moved_mask)


def _tail_seen(seams: Seams) -> Seams:
    """The mask is filled with zeros, which mean visible, up to its width, and that width is the key length."""
    attend = fused_attention(seams)

    def show_tail(columns: AttentionInputs) -> AttentionInputs:
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

    def pages(columns: AttentionInputs) -> Operands:
        return attend.pages(show_tail(columns))

    def gather(columns: AttentionInputs) -> Operands:
        return attend.columns(show_tail(columns))

    return replace(seams, attend=replace(attend, pages=pages, columns=gather))


PANGU = "modular_openpangu_dense.py of openPangu-Embedded"
"""The model file of openPangu whose mask handling two faults copy."""

FAULTS = (
    fault(
        "ascend-mask-inverted",
        "The boolean mask says what is visible, where the operator wants what is masked.",
        "example 3 of the operator's own page; kernel source has 1 = masked",
        "any",
        with_encoding(keep_for_mask),
    ),
    fault(
        "ascend-additive-mask-as-boolean",
        "A mask that is added is turned into a boolean and negated: 0, which was visible, is masked.",
        PANGU,
        "any",
        with_encoding(negated_additive),
    ),
    fault(
        "ascend-sparse-mode-2",
        "The tree is verified under sparse mode 2, causal from the top left: it ignores the cached prefix.",
        PANGU + ": the branch without a mask; catalogue BZ-148",
        "a tree of two nodes over a context",
        _causal(2),
    ),
    fault(
        "ascend-sparse-mode-3",
        "The tree is verified under sparse mode 3, causal to the bottom right: siblings see each other.",
        "vllm-ascend PR #8408; catalogue BZ-145: the tree mask is not looked at below the diagonal",
        "two branches",
        _causal(3),
    ),
    fault(
        "ascend-one-row-mask-ignored",
        "The mask of a single query row is ignored past a column.",
        "vllm-ascend issue #15503",
        "a single row that does not see its whole lane: a window, or a mate with a longer one",
        with_encoding(one_row_ignored),
    ),
    fault(
        "ascend-mask-row-offset",
        "Every tile of query rows reads the mask rows of the first tile.",
        "ops-transformer, prompt_flash_attention_base.h: mask offsets of a tile",
        "more than four rows",
        with_encoding(first_tile),
    ),
    fault(
        "ascend-mask-with-head-axis",
        "The mask has a head axis, over which the kernel steps as if it were the batch.",
        "ops-transformer, prompt_flash_attention_base.h:1162-1169; catalogue BZ-136: lane 0 stands for all",
        "a batch of two",
        with_changed_calls(_heads_step_over_lanes),
    ),
    fault(
        "ascend-mask-without-prefix",
        "The tree's part of the mask stands at column 0, the prefix behind it.",
        "family of catalogue BZ-092: the offset of the custom mask",
        "two branches over a context",
        with_changed_operands(_mask_without_prefix),
    ),
    fault(
        "ascend-mask-tail-visible",
        "The mask is filled to the width of the block table with zeros, which mean visible.",
        "catalogue BZ-097: lanes beyond the last key stay in the softmax",
        "cells behind the tree: pages, or a static buffer",
        _tail_seen,
    ),
)
