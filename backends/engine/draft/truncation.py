"""A drafted tree cut to the chunk of its root, so that no row of it stands in a chunk that holds no context yet."""

from torch import Tensor

from backends.engine.draft.base import Proposal
from backends.engine.reach import Reach
from reference.tree import Tree


def inside_chunk(tree: Tree, position: int, reaches: list[Reach]) -> list[int]:
    """The rows of `tree` in the chunk of its root, which stands at `position`; all where no layer has chunks.

    The chunk is the shortest of any layer.
    """
    chunks = [reach.chunk for reach in reaches if reach.chunk]
    if not chunks:
        return list(range(len(tree)))
    left = min(chunks) - position % min(chunks)
    return [row for row in range(len(tree)) if tree.depth[row] < left]


def truncated(proposal: Proposal, rows: list[int]) -> Proposal:
    """`proposal` with the rows `rows` alone, which hold the parent of each of them."""
    tree = proposal.tree
    if len(rows) == len(tree):
        return proposal
    place = {row: at for at, row in enumerate(rows)}

    def of(table: Tensor | None) -> Tensor | None:
        return None if table is None else table[rows]

    return Proposal(
        Tree(tuple(place[tree.parent[row]] for row in rows), tuple(tree.token[row] for row in rows)),
        of(proposal.logits),
        None if proposal.draft_ids is None else tuple(proposal.draft_ids[row] for row in rows),
        of(proposal.proposal),
    )
