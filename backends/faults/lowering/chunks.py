"""Faults of chunked attention, and of positions near the end of a table."""

from dataclasses import replace

import torch

from specverify.backends.engine.lower_tree import TreeTensors
from specverify.backends.engine.reach import Reach
from specverify.backends.engine.request import Request
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import drafted_fault, in_place_of, lowered_fault
from specverify.reference.tree import Shape, Tree

TABLE = 8
"""The number of positions in the draft's rotary table, in the fault that makes the table too short."""


@drafted_fault(
    "draft-rotary-table-too-short",
    "catalogue BZ-025: draft rotary cache sized from the draft config",
    "a draft model whose tree has an inner node beyond the table",
)
@in_place_of("branch_rows")
def short_rotary_table(
    seams: Seams, shape: Shape, level: list[int], slots: dict[int, int], root: int
) -> tuple[list[int], list[list[int]]]:
    """Draft positions beyond the draft's own rotary table read its last row.

    The table has TABLE positions, and a position beyond them is clamped to the last.
    """
    positions, columns = seams.branch_rows(shape, level, slots, root)
    return [min(position, TABLE - 1) for position in positions], columns


@lowered_fault(
    "chunk-of-root-for-all-nodes",
    "family of catalogue BZ-095, there of a sliding window: one bound for the whole block",
    "a tree across the end of a chunk",
)
@in_place_of("lower_tree")
def chunk_of_root(
    seams: Seams, tree: Tree, committed: int, position: int, reaches: list[Reach], padded_nodes: int
) -> TreeTensors:
    """The chunk of the root begins the sight of every node, also of those in the next chunk."""
    tensors = seams.lower_tree(tree, committed, position, reaches, padded_nodes)
    # Lowered again without windows and chunks, for the columns that the right mask hides.
    unlimited = seams.lower_tree(tree, committed, position, [Reach()] * len(reaches), padded_nodes)
    columns = torch.cat([torch.arange(committed), tensors.position])
    visible = [
        wide & (columns >= position - position % reach.chunk) if reach.chunk else mask
        for mask, wide, reach in zip(tensors.visible, unlimited.visible, reaches, strict=True)
    ]
    return replace(tensors, visible=visible)


@lowered_fault(
    "chunk-by-column", "no public report: right for chains alone", "a branching tree near the end of a chunk"
)
@in_place_of("lower_tree")
def chunk_by_column(
    seams: Seams, tree: Tree, committed: int, position: int, reaches: list[Reach], padded_nodes: int
) -> TreeTensors:
    """The chunk of a node is told by its KV column instead of its position.

    A row's column equals its position in a chain, but not in a tree.
    """
    tensors = seams.lower_tree(tree, committed, position, reaches, padded_nodes)
    unlimited = seams.lower_tree(tree, committed, position, [Reach()] * len(reaches), padded_nodes)
    columns = torch.arange(committed + len(tensors.slot))
    visible = [
        reach.within(wide, tensors.slot, columns) if reach.chunk else mask
        for mask, wide, reach in zip(tensors.visible, unlimited.visible, reaches, strict=True)
    ]
    return replace(tensors, visible=visible)


@lowered_fault(
    "chunk-masked-as-window",
    "no public report: transformers keeps the cache of a chunked layer as that of a sliding one",
    "a root that is not the last token of its chunk, or a tree across its end",
)
@in_place_of("lower_tree")
def chunk_slides(
    seams: Seams, tree: Tree, committed: int, position: int, reaches: list[Reach], padded_nodes: int
) -> TreeTensors:
    """A chunked layer is masked as a sliding window of the same length."""
    sliding = [Reach(window=reach.chunk or reach.window) for reach in reaches]
    return seams.lower_tree(tree, committed, position, sliding, padded_nodes)


@drafted_fault(
    "tree-cut-by-row-count",
    "no public report: a rule for chains carried over to trees",
    "a branching tree near the end of a chunk, kept inside it",
)
@in_place_of("request")
class CutByRow(Request):
    """A tree kept inside the root's chunk is cut by its number of rows instead of by depth.

    As many rows stay as positions are left in the chunk, which is right for a chain and too few for a tree.
    """

    def inside_chunk(self, tree: Tree) -> list[int]:
        chunks = [reach.chunk for reach in self.target.reaches if reach.chunk]
        room = min(chunks) - self.position % min(chunks) if chunks else len(tree)
        return [row for row in super().inside_chunk(tree) if all(up < room for up in tree.path(row))]
