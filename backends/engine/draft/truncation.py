"""The truncation of a drafted tree to the chunk of its root.

With chunked attention, a row in the next chunk would see no committed token (Llama 4 with EAGLE).
"""

from torch import Tensor

from specverify.backends.engine.draft.base import Proposal
from specverify.backends.engine.reach import Reach
from specverify.reference.tree import Tree


def inside_chunk(tree: Tree, position: int, reaches: list[Reach]) -> list[int]:
    """The rows of `tree` in the chunk of its root, which has position `position`; all rows if no layer has chunks.

    The length of a chunk is the shortest of any layer.
    """
    chunks = [reach.chunk for reach in reaches if reach.chunk]
    if not chunks:
        return list(range(len(tree)))
    positions_left = min(chunks) - position % min(chunks)  # positions left in the chunk, the root's own included
    return [row for row in range(len(tree)) if tree.depth[row] < positions_left]


def truncate_proposal(proposal: Proposal, rows: list[int]) -> Proposal:
    """`proposal` restricted to `rows`; the parent of each of these rows is among them."""
    tree = proposal.tree
    if len(rows) == len(tree):
        return proposal
    place = {row: i for i, row in enumerate(rows)}

    def restrict(table: Tensor | None) -> Tensor | None:
        return None if table is None else table[rows]

    return Proposal(
        Tree(tuple(place[tree.parent[row]] for row in rows), tuple(tree.token[row] for row in rows)),
        restrict(proposal.logits),
        None if proposal.draft_ids is None else tuple(proposal.draft_ids[row] for row in rows),
        restrict(proposal.proposal),
        proposal.head_rows,
    )
