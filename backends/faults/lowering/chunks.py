"""Faults of chunked attention, and of positions near a limit."""

from dataclasses import replace

import torch

from backends.engine.lower_tree import TreeTensors
from backends.engine.reach import Reach
from backends.engine.seams import Seams
from backends.faults.fault import Fault
from reference.trace import Stage
from reference.tree import RankTree, Tree

TABLE = 8
"""Positions in the draft's rotary table, in the fault that makes it too short."""


def short_rotary_table(seams: Seams) -> Seams:
    """The draft's rotary table has TABLE positions, and those beyond it read its last row."""

    def branch_rows(
        shape: RankTree, level: list[int], slots: dict[int, int], root: int
    ) -> tuple[list[int], list[list[int]]]:
        positions, seen = seams.branch_rows(shape, level, slots, root)
        return [min(position, TABLE - 1) for position in positions], seen

    return replace(seams, branch_rows=branch_rows)


def chunk_of_root(seams: Seams) -> Seams:
    """The chunk in which the root lies begins the sight of the whole block, also of nodes in the next chunk."""

    def tensorise(tree: Tree, committed: int, position: int, reaches: list[Reach], padded_nodes: int) -> TreeTensors:
        tensors = seams.tensorise(tree, committed, position, reaches, padded_nodes)
        whole = seams.tensorise(tree, committed, position, [Reach()] * len(reaches), padded_nodes)
        columns = torch.cat([torch.arange(committed), tensors.position])
        visible = [
            wide & (columns >= position - position % reach.chunk) if reach.chunk else mask
            for mask, wide, reach in zip(tensors.visible, whole.visible, reaches, strict=True)
        ]
        return replace(tensors, visible=visible)

    return replace(seams, tensorise=tensorise)


def chunk_by_column(seams: Seams) -> Seams:
    """A row's chunk is told by the column that it writes, not by its position; alike for a chain, not for a tree."""

    def tensorise(tree: Tree, committed: int, position: int, reaches: list[Reach], padded_nodes: int) -> TreeTensors:
        tensors = seams.tensorise(tree, committed, position, reaches, padded_nodes)
        whole = seams.tensorise(tree, committed, position, [Reach()] * len(reaches), padded_nodes)
        columns = torch.arange(committed + len(tensors.slot))
        visible = [
            reach.within(wide, tensors.slot, columns) if reach.chunk else mask
            for mask, wide, reach in zip(tensors.visible, whole.visible, reaches, strict=True)
        ]
        return replace(tensors, visible=visible)

    return replace(seams, tensorise=tensorise)


def chunk_slides(seams: Seams) -> Seams:
    """A chunked layer is masked as a sliding window of the same length."""

    def tensorise(tree: Tree, committed: int, position: int, reaches: list[Reach], padded_nodes: int) -> TreeTensors:
        sliding = [Reach(window=reach.chunk or reach.window) for reach in reaches]
        return seams.tensorise(tree, committed, position, sliding, padded_nodes)

    return replace(seams, tensorise=tensorise)


def cut_by_row(seams: Seams) -> Seams:
    """As many rows stay as positions are left in the chunk: right for a chain, too few for a tree."""

    def inside_chunk(tree: Tree, position: int, reaches: list[Reach]) -> list[int]:
        chunks = [reach.chunk for reach in reaches if reach.chunk]
        stay = seams.inside_chunk(tree, position, reaches)
        left = min(chunks) - position % min(chunks) if chunks else len(tree)
        return [row for row in stay if all(up < left for up in tree.path(row))]

    return replace(seams, inside_chunk=inside_chunk)


FAULTS = (
    Fault(
        "draft-rotary-table-too-short",
        "BZ-025",
        Stage.DRAFTED,
        "Draft positions beyond the draft's own rotary table read its last row.",
        "catalogue BZ-025: draft rotary cache sized from the draft config",
        "a draft model whose tree has an inner node beyond the table",
        short_rotary_table,
    ),
    Fault(
        "tree-cut-by-row-count",
        "",
        Stage.DRAFTED,
        "A tree kept inside the root's chunk is cut by its number of rows instead of by depth.",
        "no public report: a rule for chains carried over to trees",
        "a branching tree near the end of a chunk, kept inside it",
        cut_by_row,
    ),
    Fault(
        "chunk-of-root-for-all-nodes",
        "",
        Stage.LOWERED,
        "The chunk of the root begins the sight of every node, also of those in the next chunk.",
        "catalogue BZ-095, of a sliding window: one bound for the whole block",
        "a tree across the end of a chunk",
        chunk_of_root,
    ),
    Fault(
        "chunk-by-column",
        "",
        Stage.LOWERED,
        "The chunk of a node is told by its KV column instead of its position.",
        "no public report: right for chains alone",
        "a branching tree near the end of a chunk",
        chunk_by_column,
    ),
    Fault(
        "chunk-masked-as-window",
        "",
        Stage.LOWERED,
        "A chunked layer is masked as a sliding window of the same length.",
        "no public report: transformers keeps the cache of a chunked layer as that of a sliding one",
        "a root that is not the last token of its chunk, or a tree across its end",
        chunk_slides,
    ),
)
