"""The static tree that a table gives for the batch of a step."""

from reference.draft_trees import Dispatch
from reference.tree import RankTree


def chosen(table: Dispatch, step: int) -> RankTree:
    """The tree of step `step`: that of the smallest bound that the batch does not exceed, or else the last."""
    # After the last known batch the sizes stay as they are.
    known = table.batches[: step + 1]
    size = known[-1] if known else 1
    rows = dict(zip(table.up_to, table.trees, strict=True))
    return rows[min([bound for bound in rows if size <= bound], default=max(rows))]
