"""The best static tree for each batch size, by acceptance and step times.

A node of depth d and rank r is accepted with probability a(d, r) where its parent is accepted: the share of accepted
nodes among those offered, whatever the path and the siblings. At most one of several siblings is accepted, so that the
accepted path reaches a node with the product of a(d, r) along the path to it. The expected number of accepted nodes is
the sum of these products over all nodes below the root; one more token comes from the target. This is the positional
model of Sequoia (arXiv 2402.12374, section 3.1), with a probability of its own for each depth.

A child's product is at most its parent's, so that the nodes with the largest products are a tree, and no tree of as
many nodes has a larger sum.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heappop, heappush

from specverify.properties.accepted_ranks import Place, RankCounts
from specverify.reference.draft_trees import Dispatch, name_of, tree_of_paths
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


Costs = Mapping[int, Mapping[int, float]]
"""For each batch size and each number of nodes, the root included, the time of a step of the whole batch."""


@dataclass(frozen=True)
class Row:
    """The choice for one batch size.

    Attributes:
        batch: The number of requests that step together.
        tree: The chosen tree.
        time: The time of a step, in the unit of the costs.
        tokens: The expected number of tokens that one request emits in a step, the target's own token included.
    """

    batch: int
    tree: RankTree
    time: float
    tokens: float

    @property
    def per_time(self) -> float:
        """The expected tokens of the whole batch in one unit of time."""
        return self.batch * self.tokens / self.time


def rows(rates: Rates, costs: Costs) -> list[Row]:
    """For each batch size the tree that emits most tokens in the time of its step; of equals the smallest.

    The trees that compete have the numbers of nodes whose times are known. A tree that has fewer nodes, since others
    are never accepted, costs the time of the number that was asked for.
    """
    choices = []
    for batch, times in sorted(costs.items()):
        trees = [(nodes, best_tree(rates, nodes)) for nodes in sorted(times)]
        every = [Row(batch, tree, times[nodes], 1 + expected_accepted(tree, rates)) for nodes, tree in trees]
        # `max` keeps the first of equals.
        choices.append(max(every, key=lambda row: row.per_time))
    return choices


def table(choices: list[Row]) -> Dispatch:
    """The table of these rows; of neighbours with one tree the larger batch stays."""
    last_of_tree = [
        row for row, after in zip(choices, [*choices[1:], None], strict=True) if after is None or after.tree != row.tree
    ]
    return Dispatch(tuple(row.batch for row in last_of_tree), tuple(row.tree for row in last_of_tree))


def table_json(dispatch: Dispatch) -> dict[str, object]:
    """The table as the `shape` of a draft in a case file; trees that have a name are named."""
    trees = [name_of(tree) or {"parent": list(tree.parent), "rank": list(tree.rank)} for tree in dispatch.trees]
    return {"up_to": list(dispatch.up_to), "trees": trees}
