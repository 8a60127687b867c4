"""Faults of the lowered tree: its masks and positions."""

from dataclasses import replace

import torch
from torch import Tensor

from specverify.backends.engine.lower_tree import TreeTensors
from specverify.backends.engine.reach import Reach
from specverify.backends.engine.request import Request
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import in_place_of, lowered_fault
from specverify.reference.tree import Tree


@lowered_fault("prefix-entry-hidden", "catalogue BZ-078: chain routed through the tree worker", "any context")
@in_place_of("lower_tree")
def hide_first_prefix_entry(
    seams: Seams, tree: Tree, committed: int, position: int, reaches: list[Reach], padded_nodes: int
) -> TreeTensors:
    """The tree mask of the step hides one context entry from every node."""
    tensors = seams.lower_tree(tree, committed, position, reaches, padded_nodes)
    if committed:
        for mask in tensors.visible:
            mask[:, 0] = False
    return tensors


@lowered_fault(
    "position-advances-by-one",
    "catalogue BZ-108: cache_position advanced by one",
    "a second step after an accepted token",
)
@in_place_of("request")
class ByOne(Request):
    """Positions advance by one per step instead of by the number of committed tokens."""

    def move_root(self, num_rows: int) -> None:
        super().move_root(1)


@lowered_fault(
    "window-of-deepest-node",
    "catalogue BZ-095: window start from the last draft token",
    "a sliding window shorter than context and tree",
)
@in_place_of("lower_tree")
def window_of_deepest(
    seams: Seams, tree: Tree, committed: int, position: int, reaches: list[Reach], padded_nodes: int
) -> TreeTensors:
    """The sliding window of the deepest node bounds the context of every node."""
    tensors = seams.lower_tree(tree, committed, position, reaches, padded_nodes)
    deepest = int(tensors.position[tensors.valid].max())
    visible = []
    for mask, reach in zip(tensors.visible, reaches, strict=True):
        cut_mask = mask.clone()
        if reach.window:
            # A window of w tokens that ends at position p begins at p - w + 1.
            hidden = torch.arange(committed) <= deepest - reach.window
            cut_mask[:, :committed] &= ~hidden
        visible.append(cut_mask)
    return replace(tensors, visible=visible)


@lowered_fault(
    "window-by-arrival",
    "own: kernels that count a window in columns take the order of arrival for the order of positions",
    "a sliding window over a tree with two branches",
)
@in_place_of("lower_tree")
def window_by_arrival(
    seams: Seams, tree: Tree, committed: int, position: int, reaches: list[Reach], padded_nodes: int
) -> TreeTensors:
    """A row's sliding window ends at its place in the block in place of its position."""
    bare = [Reach(chunk=reach.chunk) for reach in reaches]
    tensors = seams.lower_tree(tree, committed, position, bare, padded_nodes)
    row = torch.arange(len(tensors.visible[0]))[:, None]
    column = torch.arange(committed + len(row))
    visible = []
    for mask, reach in zip(tensors.visible, reaches, strict=True):
        # The row in place i of the block stands at column committed + i.
        out = column[: mask.shape[1]] <= committed + row - reach.window
        visible.append(mask & ~out if reach.window else mask)
    return replace(tensors, visible=visible)


@lowered_fault("tree-masked-as-chain", "catalogue BZ-147: mask built for the new tokens only", "two branches")
@in_place_of("lower_tree")
def mask_of_new_tokens(
    seams: Seams, tree: Tree, committed: int, position: int, reaches: list[Reach], padded_nodes: int
) -> TreeTensors:
    """The block of new tokens gets a causal mask of its own, so branches see each other."""
    tensors = seams.lower_tree(tree, committed, position, reaches, padded_nodes)
    return replace(tensors, visible=[_causal(mask, committed) for mask in tensors.visible])


def _causal(mask: Tensor, committed: int) -> Tensor:
    """`mask` with a causal block in place of the tree's."""
    chain = mask.clone()
    chain[:, committed:] = torch.tril(torch.ones(len(mask), len(mask), dtype=torch.bool))
    return chain
