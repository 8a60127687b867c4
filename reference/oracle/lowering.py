"""The index arrays of a lowered tree, by definition and cell by cell.

Positions, ancestry, visibility and links.
"""

from itertools import pairwise

import numpy as np

from reference.architecture import Architecture
from reference.trace import Array, Lowered, frozen
from reference.tree import Tree


def sees(tree: Tree, row: int, column: int, context: int, reach: tuple[int, int]) -> bool:
    """Whether node `row` may attend to KV column `column`: a context token, or the column of a node on its own path.

    Columns 0..context-1 hold the context, column context + i holds node i. A window of w tokens, the row's own token
    included, hides positions w or more back (transformers: kv position > query position - w). A chunk of c tokens hides
    positions of other chunks (kv position // c == query position // c). 0 hides nothing.
    """
    window, chunk = reach
    position = context + tree.depth[row]
    if column < context:
        at = column
    elif column - context in tree.path(row):
        at = context + tree.depth[column - context]
    else:
        return False
    return (window == 0 or at > position - window) and (chunk == 0 or at // chunk == position // chunk)


def visibility(tree: Tree, context: int, reach: tuple[int, int]) -> Array:
    """Bool [nodes, context + nodes]: `sees` of every cell."""
    seen = np.zeros((len(tree), context + len(tree)), dtype=bool)
    window, chunk = reach
    for row in range(len(tree)):
        position = context + tree.depth[row]
        # The same rule as `sees`, written by ranges: the context's visible columns are one stretch.
        start = 0 if window == 0 else max(0, position - window + 1)
        start = position // chunk * chunk if chunk else start
        seen[row, start:context] = True
        for node in tree.path(row):
            seen[row, context + node] = context + tree.depth[node] >= start
    return frozen(seen)


def lower(tree: Tree, context: int, architecture: Architecture) -> Lowered:
    """The unpadded index arrays of `tree` behind `context` tokens; see `reference.trace.Lowered`."""
    nodes = len(tree)
    ancestor = np.zeros((nodes, tree.height + 1), dtype=np.int64)
    first, sibling = np.zeros(nodes, dtype=np.int64), np.zeros(nodes, dtype=np.int64)
    for node in range(nodes):
        path = tree.path(node)
        ancestor[node, : len(path)] = path
        below = tree.children[node]
        if below:
            first[node] = below[0]
        for one, following in pairwise(below):
            sibling[one] = following
    depth = np.array(tree.depth)
    # Layers with equal windows and chunks share one mask.
    masks = {reach: visibility(tree, context, reach) for reach in set(architecture.reaches)}
    return Lowered(
        token=frozen(tree.token),
        parent=frozen(tree.parent),
        depth=frozen(depth),
        position=frozen(context + depth),
        valid=frozen(np.ones(nodes, dtype=bool)),
        ancestor=frozen(ancestor),
        visible=tuple(masks[reach] for reach in architecture.reaches),
        slot=frozen(context + np.arange(nodes)),
        next_token=frozen(first),
        next_sibling=frozen(sibling),
        retrieve_index=frozen(np.arange(nodes)),
    )
