"""The check that a dynamic tree holds the best candidates, parents first.

It reads the draft's scores at the nodes of the tree alone. They suffice, since a candidate scores no more than its
parent: the children of a node that the tree does not hold cannot be better than that node.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from reference.draft_trees import Expansion
from reference.trace import Array
from reference.tree import Tree


@dataclass(frozen=True)
class Breach:
    """A way in which a tree may not be the dynamic tree of its draft.

    Attributes:
        node: The node at which it shows.
        expected: The rule.
        observed: The breach of it.
        away: How far the scores speak against the tree; 0 or less if they do not, infinite if it breaks a rule of
            numbers and orders.
    """

    node: int
    expected: str
    observed: str
    away: float = np.inf


def breaches(
    plan: Expansion, tree: Tree, ids: tuple[int, ...], logits: Array, noise: float, levels: int
) -> Iterator[Breach]:
    """The ways in which `tree` may not be a dynamic tree of `plan`.

    Args:
        plan: The settings of the dynamic tree.
        tree: The drafted tree.
        ids: The draft id of each node.
        logits: The draft's scores [nodes, draft vocabulary]; rows of NaN are unknown, and nothing is said of them.
        noise: The distance of two path scores up to which either may be the better one.
        levels: The levels that the tree was left with; those below were cut at the end of an attention chunk.
    """
    wrong = next(_disorder(plan, tree, ids, min(levels, plan.depth)), None)
    if wrong is not None:
        yield wrong
        return
    laws = [_log_law(row) for row in logits]
    scores = np.zeros(len(tree))
    for node in range(1, len(tree)):
        scores[node] = scores[tree.parent[node]] + laws[tree.parent[node]][ids[node]]
    known = ~np.isnan(scores)
    for node, below in enumerate(tree.children):
        peers = [one for one in range(len(tree)) if tree.depth[one] == tree.depth[node] and one != node]
        if below and node:
            better = sorted((float(scores[one]) for one in peers if known[one]), reverse=True)
            if len(better) >= plan.top_k:
                away = better[plan.top_k - 1] - float(scores[node])
                yield Breach(node, f"no children below a node that {plan.top_k} of its level surpass", "some", away)
        if np.isnan(laws[node]).any() or tree.depth[node] >= min(levels, plan.depth):
            continue
        for one, other in pairwise(below):
            away = float(scores[other] - scores[one])
            yield Breach(other, "siblings from the best to the last", "a better one behind a worse", away)
        left = np.delete(laws[node], [ids[child] for child in below])
        missing = float(scores[node] + left.max(initial=-np.inf))
        for child in below:
            away = missing - float(scores[child])
            yield Breach(child, "the best children of each parent", "a worse one than is missing", away)
        # Only a node that is surely expanded has candidates: one that `top_k` others of its level do not reach.
        rivals = sum(not scores[one] < scores[node] - noise for one in peers)
        if len(below) < plan.top_k and rivals < plan.top_k:
            yield from _left_out(plan, tree, node, missing, scores)


def _disorder(plan: Expansion, tree: Tree, ids: tuple[int, ...], levels: int) -> Iterator[Breach]:
    """The breaches of rules that no score decides."""
    whole = levels == plan.depth
    if len(tree) > plan.total or (whole and len(tree) < plan.total):
        yield Breach(0, f"{plan.total} nodes", f"{len(tree)} nodes")
    for node in range(1, len(tree)):
        if tree.parent[node] >= node:
            yield Breach(node, "each parent before its children", f"the parent in row {tree.parent[node]}")
    for one, other in pairwise(range(1, len(tree))):
        if (tree.depth[one], tree.parent[one]) > (tree.depth[other], tree.parent[other]):
            yield Breach(
                other,
                "nodes level by level, in the order of their parents",
                f"row {one} before it, which comes later",
            )
    if tree.height > levels:
        yield Breach(tree.depth.index(levels + 1), f"at most {levels} levels", f"{tree.height} levels")
    for node, below in enumerate(tree.children):
        if len(below) > plan.top_k or len({ids[child] for child in below}) < len(below):
            yield Breach(node, f"at most {plan.top_k} children, each another token", f"{len(below)} children")
    for level in range(1, levels + 1) if not plan.rerank else ():
        if tree.depth.count(level) != plan.top_k:
            yield Breach(0, f"{plan.top_k} nodes at each level", f"{tree.depth.count(level)} nodes at level {level}")


def _left_out(plan: Expansion, tree: Tree, node: int, missing: float, scores: Array) -> Iterator[Breach]:
    """The breach where the best child of `node` that the tree lacks, of score `missing`, is better than a held node."""
    among = [one for one in range(1, len(tree)) if plan.rerank or tree.depth[one] == tree.depth[node] + 1]
    held = [one for one in among if not np.isnan(scores[one])]
    if held:
        worst = min(held, key=lambda one: float(scores[one]))
        away = missing - float(scores[worst])
        yield Breach(worst, "the best candidates", f"less than a child of node {node} that is left out", away)


def _log_law(logits: Array) -> Array:
    """The log-probabilities of logits [V], at most 0; NaN where the logits are unknown."""
    row = np.asarray(logits, dtype=np.float64)
    shifted = row - row.max()
    law: Array = np.minimum(shifted - np.log(np.exp(shifted).sum()), 0.0)
    return law
