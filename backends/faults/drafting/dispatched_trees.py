"""Faults in the choice of a static tree by batch size."""

from specverify.backends.engine.tree_growth import TreeGrowth
from specverify.backends.faults.fault import drafted_fault, in_place_of
from specverify.reference.draft_trees import Dispatch
from specverify.reference.tree import RankTree


@drafted_fault(
    "dispatch-by-batch-before",
    "arXiv 2508.08192: the tree is chosen by the size of the batch that is about to step",
    "a table of trees by batch size, and a step whose batch is not as large as the one before it",
)
@in_place_of("trees.dispatch")
def batch_before(trees: TreeGrowth, table: Dispatch, batches: list[int]) -> RankTree:
    """The tree is chosen by the number of requests of the step before, which a host that plans ahead knows."""
    return trees.dispatch(table, batches[:-1] or batches)


@drafted_fault(
    "dispatch-bound-left-out",
    "arXiv 2508.08192: a tree serves all batches up to its bound",
    "a table of trees by batch size, and a batch as large as a bound that is not the last",
)
@in_place_of("trees.dispatch")
def bound_left_out(trees: TreeGrowth, table: Dispatch, batches: list[int]) -> RankTree:
    """A batch as large as a bound of the table gets the tree of the next bound."""
    return trees.dispatch(table, [size + 1 for size in batches])
