"""Counts of accepted nodes by depth and rank, from which trees are learned."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from specverify.reference.draft import Draft
from specverify.reference.trace import Step
from specverify.reference.tree import RankTree, Tree

Place = tuple[int, int]
"""Depth, 1 for children of the root, and rank among siblings, 0 for the best."""


@dataclass(frozen=True)
class RankCounts:
    """How often a node of each depth and rank stood below an accepted parent, and how often it was accepted."""

    offered: Mapping[Place, int] = field(default_factory=dict)
    accepted: Mapping[Place, int] = field(default_factory=dict)

    def __add__(self, other: "RankCounts") -> "RankCounts":
        return RankCounts(
            dict(Counter(self.offered) + Counter(other.offered)), dict(Counter(self.accepted) + Counter(other.accepted))
        )


def counts_of(steps: Iterable[tuple[Tree, Sequence[int]]], static: Sequence[RankTree] = ()) -> RankCounts:
    """The counts of steps, each a drafted tree and its accepted rows, the root's first.

    The rank of a node is the one in the tree of `static` that has the same parents; where there is none, its place
    among its siblings in row order.
    """
    offered: Counter[Place] = Counter()
    accepted: Counter[Place] = Counter()
    for tree, path in steps:
        ranks = next((rank_tree.rank for rank_tree in static if rank_tree.parent == tree.parent), None)
        for depth, node in enumerate(path):
            children = tree.children[node]
            for place, child in enumerate(children):
                rank = place if ranks is None else ranks[child]
                offered[depth + 1, rank] += 1
                # Rules that take twins for one candidate may go on below the twin of the accepted node.
                accepted[depth + 1, rank] += child in path[depth + 1 : depth + 2]
    return RankCounts(dict(offered), {place: count for place, count in accepted.items() if count})


def counts_of_run(draft: Draft, steps: Iterable[Step]) -> RankCounts:
    """The counts of a run's steps; none for a script, whose trees no draft ranked."""
    if draft.trees is not None:
        return RankCounts()
    is_static = draft.expansion is None and draft.stopped is None
    static = () if not is_static else [shape for shape in draft.shapes if isinstance(shape, RankTree)]
    drafted_paths = [(step.drafted.tree, step.accepted.path) for step in steps if step.drafted and step.accepted]
    return counts_of(drafted_paths, static)


def counts_by_draft(draft: Draft, steps: Iterable[Step]) -> dict[str, RankCounts]:
    """The counts of a run's steps under the tag of its draft; empty where no node was ranked."""
    counts = counts_of_run(draft, steps)
    return {draft.TAG: counts} if counts.offered else {}


def sum_counts(first: Mapping[str, RankCounts], second: Mapping[str, RankCounts]) -> dict[str, RankCounts]:
    """The sums of two mappings from kinds of draft to counts."""
    return {tag: first.get(tag, RankCounts()) + second.get(tag, RankCounts()) for tag in {**first, **second}}
