"""Faults inside attention: a right mask is read wrongly by the kernel."""

from dataclasses import replace

import torch
from torch import Tensor

from specverify.backends.engine.columns import AttentionInputs
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import attended_fault, in_place_of


@attended_fault(
    "tiles-below-diagonal-unmasked",
    "catalogue BZ-145: mask check skipped in tiles below the causal diagonal",
    "two branches",
)
@in_place_of("attend")
def tiles_below_diagonal(seams: Seams, query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
    """Attention skips the tree mask for keys that lie before the query in the block."""
    rows, width = columns.visible.shape[-2:]
    below = torch.zeros(rows, width, dtype=torch.bool, device=query.device)
    below[:, width - rows :] = torch.tril(torch.ones(rows, rows, dtype=torch.bool), -1)
    return seams.attend(query, replace(columns, visible=columns.visible | below), scaling)


@attended_fault(
    "verify-block-sees-itself-only",
    "catalogue BZ-148: speculative rows never take the cached-prefix path",
    "a tree of two nodes over a context",
)
@in_place_of("attend")
def block_sees_itself_only(seams: Seams, query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
    """A block of several rows attends to itself and never to the cached context."""
    rows, width = columns.visible.shape[-2:]
    # Plain decoding has one row and stays right, so the fault shows in tree verification only.
    if rows == 1:
        return seams.attend(query, columns, scaling)
    block_only = columns.visible.clone()
    block_only[..., : width - rows] = False
    return seams.attend(query, replace(columns, visible=block_only), scaling)


@attended_fault(
    "padding-lanes-in-denominator",
    "catalogue BZ-097: non-causal decode keeps padding lanes",
    "a key length that does not fill its tile",
)
@in_place_of("attend")
def denominator_counts_padding(seams: Seams, query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
    """Padding columns beyond the last key of a tile stay in the softmax denominator."""
    key = columns.key
    visible = columns.visible

    tile = 4
    spare = -key.shape[2] % tile
    if not spare:
        return seams.attend(query, columns, scaling)
    lanes = key.new_zeros(*key.shape[:2], spare, key.shape[3])
    open_lanes = torch.ones(*visible.shape[:-1], spare, dtype=torch.bool, device=visible.device)
    longer = replace(
        columns,
        key=torch.cat([key, lanes], 2),
        value=torch.cat([columns.value, lanes], 2),
        visible=torch.cat([visible, open_lanes], -1),
    )
    return seams.attend(query, longer, scaling)


@attended_fault(
    "mask-of-last-tree-kept",
    "catalogue BZ-090: custom mask kept after the wrapper is re-planned as causal",
    "a branching tree, then a chain of as many rows",
)
def mask_kept(seams: Seams) -> Seams:
    """The mask of the last tree stays, and a later causal block of as many rows is attended to under it."""
    last_mask: list[Tensor] = []

    def attend(query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
        rows = columns.visible.shape[2]
        block = columns.visible[..., -rows:]
        causal = torch.ones(rows, rows, dtype=torch.bool, device=query.device).tril()
        # Lanes of a batch may hold unlike trees, so only a forward of one request is considered.
        if rows > 1 and len(columns.visible) == 1:
            if not bool((block == causal).all()):
                last_mask[:] = [block]
            elif last_mask and last_mask[0].shape == block.shape:
                visible = torch.cat([columns.visible[..., :-rows], last_mask[0]], -1)
                return seams.attend(query, replace(columns, visible=visible), scaling)
        return seams.attend(query, columns, scaling)

    return replace(seams, attend=attend)


@attended_fault(
    "soft-cap-dropped",
    "own: this engine took any argument of attention that it did not know and dropped it (Gemma 2's soft cap)",
    "a model whose attention has a soft cap",
)
@in_place_of("attend")
def cap_dropped(seams: Seams, query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
    """Attention drops the argument that caps the scores, and computes them as they are."""
    return seams.attend(query, replace(columns, cap=0.0), scaling)


@attended_fault(
    "sink-in-first-row-only",
    "catalogue BZ-076: the term of the sink is added to the sum of the first query row alone",
    "a tree on a model with attention sinks",
)
@in_place_of("attend")
def sink_in_first_row(seams: Seams, query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
    """The sinks of attention take their share of the softmax in the first row of a block alone."""
    right = seams.attend(query, columns, scaling)
    if columns.sinks is None:
        return right
    wrong = seams.attend(query, replace(columns, sinks=None), scaling)
    return torch.cat([right[:, :, :1], wrong[:, :, 1:]], 2)
