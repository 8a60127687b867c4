"""The base of drafts that look tokens up in the text.

They have no model, no cache, and nothing to roll back.
"""

from collections.abc import Callable

from specverify.backends.engine.kv.base import KvCache
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.tree import RankTree, Tree


class LookupDraft:
    """A draft whose state is made of tokens of prompt and output alone."""

    cache: KvCache | None = None
    calls = 0
    reads: HiddenStates | None = None

    def settle(self, rows: list[int]) -> None:
        """Do nothing: no speculated token entered the state."""

    def resume(self, cache: KvCache | None) -> None:
        """Do nothing: this draft has no cache."""

    def abandon(self) -> None:
        """Do nothing: a proposal changes no state but that of committed tokens."""


def fill_shape(shape: RankTree, tokens: list[int], followers: Callable[[list[int]], list[int]]) -> Tree:
    """The tree `shape` below `tokens[-1]`; a node whose rank does not exist is left out, with all nodes below it.

    Args:
        shape: The tree.
        tokens: Prompt and output so far.
        followers: From a sequence to the tokens that may follow it, the best first.
    """
    token = {0: tokens[-1]}
    # By depth, since a parent may come after its children in row order.
    for node in sorted(range(1, len(shape)), key=lambda node: shape.depth[node]):
        path = shape.path(node)[:-1]
        if all(ancestor in token for ancestor in path):
            ranked = followers([*tokens[:-1], *[token[ancestor] for ancestor in path]])
            if shape.rank[node] < len(ranked):
                token[node] = ranked[shape.rank[node]]
    nodes = sorted(token)
    row_of = {node: i for i, node in enumerate(nodes)}
    return Tree(tuple(row_of[shape.parent[node]] for node in nodes), tuple(token[node] for node in nodes))
