"""Lowering: the mask of a whole tree is the rule of one cell, asked of every cell."""

import random

from specverify.reference.oracle.lowering import is_visible, visibility
from specverify.reference.tree import Tree

REACHES = ((0, 0), (1, 0), (2, 0), (5, 0), (0, 1), (0, 3), (0, 4), (100, 0), (0, 100))


def draw_tree(chance: random.Random, nodes: int) -> Tree:
    """A tree of so many nodes, whose parents may come after their children."""
    order = [0, *chance.sample(range(1, nodes), nodes - 1)]
    parent = [0] * nodes
    for index in range(1, nodes):
        parent[order[index]] = order[chance.randrange(index)]
    return Tree(tuple(parent), tuple(range(nodes)))


def test_visibility_is_what_each_row_sees_cell_by_cell() -> None:
    chance = random.Random(0)
    for nodes in (1, 2, 3, 5, 8):
        for context in (0, 1, 4, 7):
            tree = draw_tree(chance, nodes)
            for reach in REACHES:
                mask = visibility(tree, context, reach)
                cells = [
                    [is_visible(tree, row, column, context, reach) for column in range(context + nodes)]
                    for row in range(nodes)
                ]
                assert mask.tolist() == cells, (tree, context, reach)


def test_a_row_sees_its_path_and_what_window_and_chunk_leave_of_it() -> None:
    # 3 context columns; 1 and 2 hang from the root, 3 from 2: positions 3, 4, 4, 5.
    tree = Tree((0, 0, 0, 2), (0, 1, 2, 3))

    def columns(row: int, window: int = 0, chunk: int = 0) -> list[int]:
        return [column for column in range(7) if is_visible(tree, row, column, 3, (window, chunk))]

    assert columns(3) == [0, 1, 2, 3, 5, 6]
    assert columns(1) == [0, 1, 2, 3, 4]
    assert columns(3, window=1) == [6]
    assert columns(3, window=3) == [3, 5, 6]
    assert columns(3, window=4) == [2, 3, 5, 6]
    assert columns(3, chunk=4) == [5, 6]
    assert columns(0, chunk=3) == [3]
    assert columns(0, chunk=4) == [0, 1, 2, 3]
