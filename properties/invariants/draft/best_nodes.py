"""The check that a dynamic tree holds the best candidates, parents first.

It reads the draft's scores at the nodes of the tree alone. They suffice, since a candidate scores no more than its
parent: the children of a node that the tree does not hold cannot be better than that node.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from specverify.reference.draft_trees import Expansion
from specverify.reference.trace import Array
from specverify.reference.tree import Tree


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
    is_known = ~np.isnan(scores)
    for node, children in enumerate(tree.children):
        peers = [peer for peer in range(len(tree)) if tree.depth[peer] == tree.depth[node] and peer != node]
        if children and node:
            better = sorted((float(scores[peer]) for peer in peers if is_known[peer]), reverse=True)
            if len(better) >= plan.top_k:
                away = better[plan.top_k - 1] - float(scores[node])
                yield Breach(node, f"no children below a node that {plan.top_k} of its level surpass", "some", away)
        if np.isnan(laws[node]).any() or tree.depth[node] >= min(levels, plan.depth):
            continue
        for first, second in pairwise(children):
            away = float(scores[second] - scores[first])
            yield Breach(second, "siblings from the best to the last", "a better one behind a worse", away)
        unused = np.delete(laws[node], [ids[child] for child in children])
        missing = float(scores[node] + unused.max(initial=-np.inf))
        for child in children:
            away = missing - float(scores[child])
            yield Breach(child, "the best children of each parent", "a worse one than is missing", away)
        # Only a node that is surely expanded has candidates: one that `top_k` others of its level do not reach.
        rivals = sum(not scores[peer] < scores[node] - noise for peer in peers)
        if len(children) < plan.top_k and rivals < plan.top_k:
            yield from _missing_candidate(plan, tree, node, missing, scores)


def _disorder(plan: Expansion, tree: Tree, ids: tuple[int, ...], levels: int) -> Iterator[Breach]:
    """The breaches of rules that no score decides."""
    is_uncut = levels == plan.depth
    if len(tree) > plan.total or (is_uncut and len(tree) < plan.total):
        yield Breach(0, f"{plan.total} nodes", f"{len(tree)} nodes")
    for node in range(1, len(tree)):
        if tree.parent[node] >= node:
            yield Breach(node, "each parent before its children", f"the parent in row {tree.parent[node]}")
    for first, second in pairwise(range(1, len(tree))):
        if (tree.depth[first], tree.parent[first]) > (tree.depth[second], tree.parent[second]):
            yield Breach(
                second,
                "nodes level by level, in the order of their parents",
                f"row {first} before it, which comes later",
            )
    if tree.height > levels:
        yield Breach(tree.depth.index(levels + 1), f"at most {levels} levels", f"{tree.height} levels")
    for node, children in enumerate(tree.children):
        if len(children) > plan.top_k or len({ids[child] for child in children}) < len(children):
            yield Breach(node, f"at most {plan.top_k} children, each another token", f"{len(children)} children")
    for level in range(1, levels + 1) if not plan.rerank else ():
        if tree.depth.count(level) != plan.top_k:
            yield Breach(0, f"{plan.top_k} nodes at each level", f"{tree.depth.count(level)} nodes at level {level}")


def _missing_candidate(plan: Expansion, tree: Tree, node: int, missing: float, scores: Array) -> Iterator[Breach]:
    """The breach where the best child of `node` that the tree lacks, of score `missing`, is better than a held node."""
    candidates = [
        candidate for candidate in range(1, len(tree)) if plan.rerank or tree.depth[candidate] == tree.depth[node] + 1
    ]
    scored = [candidate for candidate in candidates if not np.isnan(scores[candidate])]
    if scored:
        worst = min(scored, key=lambda candidate: float(scores[candidate]))
        away = missing - float(scores[worst])
        yield Breach(worst, "the best candidates", f"less than a child of node {node} that is left out", away)


def _log_law(logits: Array) -> Array:
    """The log-probabilities of logits [V], at most 0; NaN where the logits are unknown."""
    row = np.asarray(logits, dtype=np.float64)
    shifted = row - row.max()
    law: Array = np.minimum(shifted - np.log(np.exp(shifted).sum()), 0.0)
    return law
