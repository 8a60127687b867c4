"""The nodes of a tree by depth, as rows of a breadth-first order."""

from dataclasses import dataclass

import numpy as np

from specverify.reference.trace import Array
from specverify.reference.tree import Tree


@dataclass(frozen=True)
class Level:
    """The nodes of one depth, as rows of a breadth-first order.

    Attributes:
        first: The first row of the level.
        last: The row after the last one.
        paths: The path of each row from the root, int [last - first, depth + 1].
    """

    first: int
    last: int
    paths: Array


def levels_of(tree: Tree) -> tuple[list[int], list[Level]]:
    """The nodes in breadth-first order, and the levels of that order."""
    order, levels = [0], [Level(0, 1, np.zeros((1, 1), dtype=np.int64))]
    while True:
        parent_level = levels[-1]
        children = [
            (row, child) for row in range(parent_level.first, parent_level.last) for child in tree.children[order[row]]
        ]
        if not children:
            return order, levels
        first = len(order)
        order += [child for _, child in children]
        rows = np.arange(first, len(order))
        parents = np.array([row for row, _ in children]) - parent_level.first
        levels.append(Level(first, len(order), np.column_stack([parent_level.paths[parents], rows])))
