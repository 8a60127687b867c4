"""The best static tree for each batch size, by acceptance and step times."""

from collections.abc import Mapping
from dataclasses import dataclass

from specverify.dispatch.lengths import Rates, best_tree, expected_accepted
from specverify.reference.draft_trees import Dispatch, name_of
from specverify.reference.tree import RankTree

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
