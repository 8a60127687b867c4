"""The trees that a draft may fill: static or dynamic; some static ones have names."""

from reference.draft_trees.expansion import Expansion
from reference.draft_trees.names import CHOICES, named_tree, tree_of_paths
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
    "CHOICES",
    "TREE_KINDS",
    "DraftTree",
    "Expansion",
    "draft_tree_from_json",
    "most_rank",
    "named_tree",
    "open_rows",
    "outlines",
    "tree_kind",
    "tree_of_paths",
]
