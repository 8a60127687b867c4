"""The draft that joins the candidates of several drafts to one tree."""

from dataclasses import replace

from torch import Tensor

from specverify.backends.engine.draft.base import OPENERS, CachelessDraft, Draft, Opening, Proposal, opens
from specverify.backends.engine.sampling.step import StepSampling
from specverify.reference.draft.merged import Merged
from specverify.reference.tree import Tree


class MergedDraft(CachelessDraft):
    """Joins the trees of drafts that look tokens up; `specverify.reference.draft.merged` has the order of its nodes.

    Attributes:
        drafts: The drafts, in the order in which their candidates are joined.
        nodes: The most nodes of a tree.
    """

    def __init__(self, drafts: list[Draft], nodes: int) -> None:
        self.drafts = drafts
        self.nodes = nodes

    def propose(self, tokens: list[int], chance: StepSampling | None = None, hidden: Tensor | None = None) -> Proposal:
        """Propose the joined tree."""
        trees = [draft.propose(tokens).tree for draft in self.drafts]
        parent, token = [0], [tokens[-1]]
        below: dict[tuple[int, int], int] = {}
        # For each tree, the row of the joined tree that each of its nodes is; a node beyond the limit has none.
        rows: list[dict[int, int]] = [{0: 0} for _ in trees]
        for level in range(1, 1 + max(tree.height for tree in trees)):
            for tree, row in zip(trees, rows, strict=True):
                for node in range(len(tree)):
                    if tree.depth[node] == level and tree.parent[node] in row:
                        place = row[tree.parent[node]]
                        joined_row = self.find_child(below, place, tree.token[node])
                        if joined_row is None and len(parent) < self.nodes:
                            joined_row = below[place, tree.token[node]] = len(parent)
                            parent.append(place)
                            token.append(tree.token[node])
                        if joined_row is not None:
                            row[node] = joined_row
        return Proposal(Tree(tuple(parent), tuple(token)))

    def find_child(self, below: dict[tuple[int, int], int], parent: int, token: int) -> int | None:
        """The child of row `parent` with `token`, where `below` holds the children so far; None if there is none."""
        return below.get((parent, token))


@opens(Merged.TAG)
def open_draft(opening: Opening) -> MergedDraft:
    """Open each of the drafts, for the same request."""
    draft = opening.case.draft
    assert isinstance(draft, Merged)
    parts = [replace(opening, case=replace(opening.case, draft=part)) for part in draft.drafts]
    return MergedDraft([OPENERS[part.case.draft.TAG](part) for part in parts], draft.nodes)
