"""DraftTree: any tree that a draft may fill, and questions on it."""

from collections.abc import Mapping
from typing import Any, TypeAlias

from reference.draft_trees.expansion import Expansion
from reference.tree import RankTree

DraftTree: TypeAlias = RankTree | Expansion
"""A static tree of ranks, or a dynamic tree."""


def outlines(tree: DraftTree) -> tuple[RankTree, ...]:
    """Static trees as large, as deep and as branched as `tree` can become."""
    return (tree,) if isinstance(tree, RankTree) else (tree.outline,)


def most_rank(tree: DraftTree) -> int:
    """The largest rank of any node of `tree`, or of any candidate."""
    return max(tree.rank) if isinstance(tree, RankTree) else tree.top_k - 1


def open_rows(tree: DraftTree) -> int:
    """The most rows that a proposal of `tree` opens in the draft's cache, the root's included."""
    return len(tree) if isinstance(tree, RankTree) else tree.open_rows


def tree_kind(tree: DraftTree) -> str:
    """The kind of `tree`, one of TREE_KINDS."""
    return "static" if isinstance(tree, RankTree) else "dynamic"


TREE_KINDS = ("static", "dynamic")
"""The kinds of tree that a draft may fill."""


def draft_tree_from_json(content: Mapping[str, Any]) -> DraftTree:
    """The tree that the checked JSON object `content` describes; raises Malformed with the path below it."""
    if "top_k" in content:
        return Expansion(**content)
    return RankTree(tuple(content["parent"]), tuple(content["rank"]))
