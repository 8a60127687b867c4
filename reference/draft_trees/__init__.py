"""The trees that a draft may fill: static, dynamic, or by batch size."""

from specverify.reference.draft_trees.dispatch import Dispatch
from specverify.reference.draft_trees.expansion import Expansion
from specverify.reference.draft_trees.names import CHOICES, name_of, named_tree, tree_description, tree_of_paths
from specverify.reference.draft_trees.plan import (
    TREE_KINDS,
    DraftTree,
    dispatch_from_json,
    draft_tree_from_json,
    most_rank,
    open_rows,
    outlines,
    static_tree_from_json,
    tree_kind,
)

__all__ = [
    "CHOICES",
    "TREE_KINDS",
    "Dispatch",
    "DraftTree",
    "Expansion",
    "dispatch_from_json",
    "draft_tree_from_json",
    "most_rank",
    "name_of",
    "named_tree",
    "open_rows",
    "outlines",
    "static_tree_from_json",
    "tree_description",
    "tree_kind",
    "tree_of_paths",
]
