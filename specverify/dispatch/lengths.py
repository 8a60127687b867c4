"""Expected accepted length of a static tree, and the best trees by it.

A node of depth d and rank r is accepted with probability a(d, r) where its parent is accepted: the share of accepted
nodes among those offered, whatever the path and the siblings. At most one of several siblings is accepted, so that the
accepted path reaches a node with the product of a(d, r) along the path to it. The expected number of accepted nodes is
the sum of these products over all nodes below the root; one more token comes from the target. This is the positional
model of Sequoia (arXiv 2402.12374, section 3.1), with a probability of its own for each depth.

A child's product is at most its parent's, so that the nodes with the largest products are a tree, and no tree of as
many nodes has a larger sum.
"""

from collections.abc import Mapping
from heapq import heappop, heappush

from specverify.properties.accepted_ranks import Place, RankCounts
from specverify.reference.draft_trees import tree_of_paths
from specverify.reference.tree import RankTree

Rates = Mapping[Place, float]
"""The probability of acceptance by depth and rank, given that the parent was accepted."""


def rates_of(counts: RankCounts) -> dict[Place, float]:
    """The share of accepted nodes of each depth and rank; places that were never offered are absent."""
    return {place: counts.accepted.get(place, 0) / offered for place, offered in counts.offered.items()}


def expected_accepted(tree: RankTree, rates: Rates) -> float:
    """The expected number of accepted drafted tokens of a step, without the token of the target that follows them."""
    reached = [1.0] * len(tree)
    for node in sorted(range(1, len(tree)), key=lambda node: tree.depth[node]):
        reached[node] = reached[tree.parent[node]] * rates.get((tree.depth[node], tree.rank[node]), 0.0)
    return sum(reached[1:])


def best_tree(rates: Rates, nodes: int) -> RankTree:
    """The tree of at most `nodes` nodes, the root included, with the largest expected length.

    Of equal products the shallower node comes first, then the one with the better ranks. A node that is never accepted
    is left out, so that the tree may have fewer nodes.
    """
    paths: list[tuple[int, ...]] = []
    waiting: list[tuple[float, int, tuple[int, ...]]] = [(-1.0, 0, ())]
    while waiting and len(paths) < nodes:
        least, depth, path = heappop(waiting)
        paths.append(path)
        for (level, rank), rate in rates.items():
            if level == depth + 1 and rate > 0:
                heappush(waiting, (least * rate, level, (*path, rank)))
    return tree_of_paths(paths[1:])
