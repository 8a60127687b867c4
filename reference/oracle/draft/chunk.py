"""The part of a drafted tree that lies in the chunk of its root.

Targets whose layers attend in chunks may have the rest cut before verification (`KvLayout.stay_in_chunk`).
"""

from specverify.reference.architecture import Architecture
from specverify.reference.trace import Array, Drafted, frozen


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
    )
