"""The trees that a draft may fill: static, or expanded and reranked."""

from reference.draft_trees.expansion import Expansion
from reference.draft_trees.plan import (
    TREE_KINDS,
    DraftTree,
    draft_tree_from_json,
    most_rank,
    open_rows,
    outlines,
    tree_kind,
)

__all__ = [
    "TREE_KINDS",
    "DraftTree",
    "Expansion",
    "draft_tree_from_json",
    "most_rank",
    "open_rows",
    "outlines",
    "tree_kind",
]
