"""The choice of a static tree by the number of requests that step together."""

from bisect import bisect_left

from specverify.reference.draft_trees import Dispatch
from specverify.reference.tree import RankTree


def dispatch(table: Dispatch, batches: list[int]) -> RankTree:
    """The tree of `table` for the last of `batches`; a batch beyond all bounds gets the last tree.

    Args:
        table: The bounds, ascending, and the tree of each.
        batches: The number of requests of each batch with which the request was drafted; the last one is now.
    """
    row = bisect_left(table.up_to, batches[-1])
    return table.trees[min(row, len(table.trees) - 1)]
