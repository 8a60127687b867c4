"""Predicted ties of drafted nodes: how often the noise of a draft's scores moves a node of its tree.

The noise is that of the draft's own control, the scores at the root of the first step: nothing was rolled back before
it, and no tree has part in it.
"""

from collections.abc import Iterator

import numpy as np
from scipy.special import ndtr

from specverify.properties.invariants.draft.scores import draft_sigma, restarted_case, score_distance
from specverify.properties.tolerance.bounds import UNIT
from specverify.properties.tolerance.closeness import PRIOR, rms
from specverify.properties.verdict.invariant import Oracle
from specverify.properties.verdict.subject import Subject
from specverify.reference.case import Case
from specverify.reference.draft_trees import Expansion
from specverify.reference.trace import Array, Drafted
from specverify.reference.tree import Tree

RUNNERS_UP = 8
"""Scores below a candidate that may surpass it; the ones further down are neglected."""


def control_sigma(case: Case, oracle: Oracle, subject: Subject) -> float | None:
    """The error of the draft's scores at the root of the first step; None where the backend does not show them."""
    sigma = subject.compute_once(("draft control", case), lambda: _measure(case, oracle, subject))
    assert sigma is None or isinstance(sigma, float)
    return sigma


def _measure(case: Case, oracle: Oracle, subject: Subject) -> float | None:
    step = next(iter(subject(case).steps), None)
    if step is None or step.drafted is None or step.drafted.logits is None:
        return None
    true = oracle(restarted_case(case, (*step.context, step.drafted.tree.token[0]))).steps[0].drafted
    if true is None or true.logits is None or np.isnan(true.logits[0]).all():
        return None
    if step.drafted.logits.shape[1:] != true.logits.shape[1:]:
        return None
    size = float(rms(true.logits[0][~np.isneginf(true.logits[0])]))
    least = PRIOR[case.dtype][0] * UNIT[case.dtype] * size
    # Capped, as the control of the target is: a fault would otherwise excuse its own ties.
    error = score_distance(step.drafted.logits[0], true.logits[0])
    return float(np.clip(error, least, draft_sigma(case, true.logits)))


def rank_ties(case: Case, true: Drafted, sigma: float | None) -> float:
    """The ties predicted for a tree whose nodes are children by rank: pairs of scores that noise would exchange."""
    if true.logits is None or true.draft_ids is None:
        return 0.0
    noise = draft_sigma(case, true.logits) if sigma is None else sigma
    rows = [
        _expected_exchanges(true.logits[node], [true.draft_ids[child] for child in below], noise)
        for node, below in enumerate(true.tree.children)
        if below and not np.isnan(true.logits[node]).all()
    ]
    # A step has one tie at most.
    return min(1.0, sum(rows))


def _expected_exchanges(row: Array, tokens: list[int], sigma: float) -> float:
    """The expected number of pairs in `row` that noise exchanges and of which at least one is `tokens`."""
    order = np.argsort(-row, kind="stable")
    last = max(int(np.flatnonzero(order == token)[0]) for token in tokens)
    best = row[order[: last + 1 + RUNNERS_UP]]
    best = best[~np.isneginf(best)]
    chosen = np.isin(order[: len(best)], tokens)
    pairs = np.triu(chosen[:, None] | chosen[None, :], 1)
    # Both scores carry noise, so their difference has sigma * sqrt(2).
    return float(ndtr(-np.abs(best[:, None] - best[None, :])[pairs] / (np.sqrt(2) * sigma)).sum())


def path_ties(
    case: Case, plan: Expansion, tree: Tree, ids: tuple[int, ...], logits: Array, levels: int, sigma: float | None
) -> float:
    """The ties predicted for a dynamic tree: pairs of path scores that noise would exchange.

    `logits` [nodes, draft vocabulary] are the draft's true scores of the nodes above `levels`, NaN for others. `sigma`
    is the noise of a score, None for the a-priori one.
    """
    noise = draft_sigma(case, logits) if sigma is None else sigma
    candidates = sorted(_candidates(plan, tree, ids, logits, levels), reverse=True)
    expected = 0.0
    for place, (score, path) in enumerate(candidates[: len(tree)]):
        for rival_score, rival in candidates[place + 1 : place + 1 + RUNNERS_UP]:
            pairs = enumerate(zip(path, rival, strict=False))
            common = next((depth for depth, (first, second) in pairs if first != second), min(len(path), len(rival)))
            # The addends of one path alone, each with the noise of a logit.
            addends = 2 * (max(len(path), len(rival)) - common)
            expected += float(ndtr(-(score - rival_score) / (np.sqrt(addends) * noise)))
    # A step has one tie at most.
    return min(1.0, expected)


def _candidates(
    plan: Expansion, tree: Tree, ids: tuple[int, ...], logits: Array, levels: int
) -> Iterator[tuple[float, tuple[int, ...]]]:
    """The score and the path of draft ids of each candidate below a node of the tree."""
    reached: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for node in sorted(range(len(tree)), key=lambda each: tree.depth[each]):
        if node not in reached or tree.depth[node] >= levels or np.isnan(logits[node]).any():
            continue
        score, path = reached[node]
        law = logits[node] - np.logaddexp.reduce(logits[node])
        for child in tree.children[node]:
            reached[child] = (score + float(law[ids[child]]), (*path, ids[child]))
        for draft_id in np.argsort(-law, kind="stable")[: plan.top_k + 1].tolist():
            yield score + float(law[draft_id]), (*path, draft_id)
