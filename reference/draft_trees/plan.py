"""DraftTree: any tree that a draft may fill, and questions on it."""

from collections.abc import Mapping
from typing import Any, TypeAlias

from specverify.reference.draft_trees.dispatch import Dispatch
from specverify.reference.draft_trees.expansion import Expansion
from specverify.reference.draft_trees.names import named_tree
from specverify.reference.files.json_parts import rank_tree_from_json
from specverify.reference.malformed import under
from specverify.reference.tree import RankTree

DraftTree: TypeAlias = RankTree | Expansion | Dispatch
"""A static tree of ranks, a dynamic tree, or a table of static trees by batch size."""


def outlines(tree: DraftTree) -> tuple[RankTree, ...]:
    """Static trees as large, as deep and as branched as `tree` can become."""
    if isinstance(tree, Dispatch):
        return tree.trees
    return (tree,) if isinstance(tree, RankTree) else (tree.outline,)


def most_rank(tree: DraftTree) -> int:
    """The largest rank of any node of `tree`, or of any candidate."""
    return tree.top_k - 1 if isinstance(tree, Expansion) else max(max(outline.rank) for outline in outlines(tree))


def open_rows(tree: DraftTree) -> int:
    """The most rows that a proposal of `tree` opens in the draft's cache, the root's included."""
    return tree.open_rows if isinstance(tree, Expansion) else max(map(len, outlines(tree)))


def tree_kind(tree: DraftTree) -> str:
    """The kind of `tree`, one of TREE_KINDS."""
    if isinstance(tree, Dispatch):
        return "dispatched"
    return "static" if isinstance(tree, RankTree) else "dynamic"


TREE_KINDS = ("static", "dynamic", "dispatched")
"""The kinds of tree that a draft may fill."""


def static_tree_from_json(content: str | Mapping[str, Any]) -> RankTree:
    """The static tree that a name or a checked JSON object describes; raises Malformed with the path below it."""
    if isinstance(content, str):
        return named_tree(content)
    return rank_tree_from_json(dict(content))


def draft_tree_from_json(content: str | Mapping[str, Any]) -> DraftTree:
    """The tree that a name or a checked JSON object describes; raises Malformed with the path below it."""
    if isinstance(content, str):
        return named_tree(content)
    if "top_k" in content:
        return Expansion(**content)
    if "up_to" in content:
        return dispatch_from_json(content)
    return static_tree_from_json(content)


def dispatch_from_json(content: Mapping[str, Any]) -> Dispatch:
    """The table that a checked JSON object describes; raises Malformed with the path below it."""
    trees = []
    for i, tree in enumerate(content["trees"]):
        with under(f"trees[{i}]"):
            trees.append(static_tree_from_json(tree))
    return Dispatch(tuple(content["up_to"]), tuple(trees), tuple(content.get("batches", ())))
