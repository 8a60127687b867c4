"""The index arrays of a lowered tree, by definition: positions, ancestry, visibility, links.

Targets whose layers attend in chunks may have a part of the tree cut before verification (`KvLayout.stay_in_chunk`).
"""

from itertools import pairwise

import numpy as np

from specverify.reference.architecture import Architecture
from specverify.reference.images import Images
from specverify.reference.oracle.formulas.rotary import grid_positions
from specverify.reference.trace import Array, Drafted, Lowered, frozen
from specverify.reference.tree import Tree


def is_visible(tree: Tree, row: int, column: int, context: int, reach: tuple[int, int]) -> bool:
    """Whether node `row` may attend to KV column `column`: a context token, or the column of a node on its own path.

    Columns 0..context-1 hold the context, column context + i holds node i. A window of w tokens, the row's own token
    included, hides positions w or more back (transformers: kv position > query position - w). A chunk of c tokens hides
    positions of other chunks (kv position // c == query position // c). 0 hides nothing.
    """
    window, chunk = reach
    position = context + tree.depth[row]
    if column < context:
        column_position = column
    elif column - context in tree.path(row):
        column_position = context + tree.depth[column - context]
    else:
        return False
    return (window == 0 or column_position > position - window) and (
        chunk == 0 or column_position // chunk == position // chunk
    )


def visibility(tree: Tree, context: int, reach: tuple[int, int]) -> Array:
    """Bool [nodes, context + nodes]: `is_visible` of every cell."""
    visible = np.zeros((len(tree), context + len(tree)), dtype=bool)
    window, chunk = reach
    for row in range(len(tree)):
        position = context + tree.depth[row]
        # The same rule as `is_visible`, written by ranges: the context's visible columns are one stretch.
        start = 0 if window == 0 else max(0, position - window + 1)
        start = position // chunk * chunk if chunk else start
        visible[row, start:context] = True
        for node in tree.path(row):
            visible[row, context + node] = context + tree.depth[node] >= start
    return frozen(visible)


def lower(tree: Tree, context: int, architecture: Architecture, images: Images = ()) -> Lowered:
    """The unpadded index arrays of `tree` behind `context` tokens; see `specverify.reference.trace.Lowered`.

    `images` are those of a text whose target has three axes.
    """
    nodes = len(tree)
    ancestor = np.zeros((nodes, tree.height + 1), dtype=np.int64)
    first_child, next_sibling = np.zeros(nodes, dtype=np.int64), np.zeros(nodes, dtype=np.int64)
    for node in range(nodes):
        path = tree.path(node)
        ancestor[node, : len(path)] = path
        children = tree.children[node]
        if children:
            first_child[node] = children[0]
        for child, following_child in pairwise(children):
            next_sibling[child] = following_child
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
        next_token=frozen(first_child),
        next_sibling=frozen(next_sibling),
        retrieve_index=frozen(np.arange(nodes)),
        axes=frozen(grid_positions(images, [*range(context), *(context + depth)]))
        if architecture.words.three_axes
        else None,
    )


def cut_to_chunk(drafted: Drafted, position: int, architecture: Architecture) -> Drafted:
    """The part of `drafted`, whose root is at `position`, that stays when nodes outside the root's chunk are cut.

    A node stays if position // c is the same for the node and the root; c is the shortest chunk of any layer.
    """
    # Layers may have different chunks; the shortest one hides the most.
    chunks = [chunk for _, chunk in architecture.reaches if chunk]
    tree = drafted.tree
    if not chunks:
        return drafted
    size = min(chunks)
    nodes = [node for node in range(len(tree)) if (position + tree.depth[node]) // size == position // size]

    def rows(table: Array | None) -> Array | None:
        return None if table is None else frozen(table[nodes])

    return Drafted(
        tree.subtree(nodes),
        rows(drafted.logits),
        None if drafted.draft_ids is None else tuple(drafted.draft_ids[node] for node in nodes),
        rows(drafted.proposal),
        drafted.given,
        rows(drafted.confidence),
    )
