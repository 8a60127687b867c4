"""The invariant of trees whose paths end by the draft's confidence, and their comparison up to rule T.

A node has all its children of the widest tree, or none. Where the confidence lies within the noise of a log-probability
from the bound, it may have either.
"""

from collections.abc import Iterator
from math import log

import numpy as np
from scipy.special import ndtr

from specverify.properties.invariants.applies import is_drawn
from specverify.properties.invariants.draft import tie_prediction
from specverify.properties.invariants.draft.dynamic_trees import (
    ROUNDING,
    Breach,
    compare_up_to_ties,
    draft_ids_of,
    levels_in_chunk,
    log_law,
)
from specverify.properties.invariants.draft.scores import (
    confidence_below,
    draft_sigma,
    line,
    scores_below,
    tree_finding,
)
from specverify.properties.tolerance.ties import TIE_SIGMA
from specverify.properties.verdict.finding import Comparisons, Finding
from specverify.properties.verdict.invariant import Fact, Invariant, NotApplicable, Oracle, needing
from specverify.properties.verdict.subject import Subject
from specverify.reference.case import Case
from specverify.reference.draft_trees import Stopped
from specverify.reference.trace import Array, Drafted, Stage, Step
from specverify.reference.tree import Tree

NAME = "draft.stops"


def margins(
    plan: Stopped, tree: Tree, ids: tuple[int, ...], logits: Array, confidence: Array | None = None
) -> dict[int, float] | None:
    """The confidence at each node of `tree` that may have children, less the bound; below 0 the path ends there.

    Both are log-probabilities, and NaN where they are unknown. None where the tree is no part of the widest one.
    `logits` [nodes, draft vocabulary] are the draft's scores, NaN where they are unknown, and `ids` the draft ids;
    `confidence` [nodes] are the log-probabilities of a confidence head, where it decides.
    """
    rows = plan.rows_in_tree(tree.children)
    if rows is None:
        return None
    laws = [log_law(row) for row in logits]
    scores = np.zeros(len(tree))
    for node in sorted(range(1, len(tree)), key=tree.depth.__getitem__):
        scores[node] = scores[tree.parent[node]] + laws[tree.parent[node]][ids[node]]
    survival = np.zeros(len(tree))
    for node in sorted(range(1, len(tree)), key=tree.depth.__getitem__) if confidence is not None else ():
        survival[node] = survival[tree.parent[node]] + confidence[tree.parent[node]]  # type: ignore[index]
    compared: dict[int, float] = {}
    for node, row in enumerate(rows):
        if not plan.tree.children[row] or (plan.when == "after" and not node):
            continue
        if plan.when == "before":
            above, own = scores[node], laws[node].max()
        elif plan.when == "head":
            above, own = survival[node], np.nan if confidence is None else confidence[node]
        else:
            above, own = scores[tree.parent[node]], laws[tree.parent[node]][ids[node]]
        compared[node] = float(own + above * plan.cumulated) - log(plan.stop_below)
    return compared


def breaches(
    plan: Stopped, tree: Tree, ids: tuple[int, ...], logits: Array, levels: int, confidence: Array | None = None
) -> Iterator[Breach]:
    """The ways in which `tree` may not end where the draft's `logits` or its `confidence` say; see `margins`.

    The tree was left with so many `levels`; those below were cut at the end of an attention chunk.
    """
    compared = margins(plan, tree, ids, logits, confidence)
    if compared is None:
        yield Breach(0, f"a part of {plan.description}", line(tree))
        return
    if plan.when == "after" and levels and len(plan.tree) > 1 and not tree.children[0]:
        yield Breach(0, "children of the root", "none")
    for node, margin in compared.items():
        if tree.depth[node] >= levels or np.isnan(margin):
            continue
        has_children = bool(tree.children[node])
        away = -margin if has_children else margin
        expected, observed = ("no children", "some") if has_children else ("children", "none")
        side = "below" if has_children else "at or above"
        yield Breach(node, f"{expected}: its confidence lies {side} {plan.stop_below:g}", observed, away)


def wrong_tokens(plan: Stopped, tree: Tree, ids: tuple[int, ...], logits: Array) -> Iterator[Breach]:
    """The nodes that may not be the children of their ranks, by the draft's `logits`."""
    rows = plan.rows_in_tree(tree.children)
    assert rows is not None
    for node in range(1, len(tree)):
        scores = logits[tree.parent[node]]
        if np.isnan(scores).any():
            continue
        rank = plan.tree.rank[rows[node]]
        expected = int(np.argsort(-scores, kind="stable")[rank])
        away = float(abs(scores[expected] - scores[ids[node]]))
        yield Breach(node, f"the token of rank {rank}", f"draft id {ids[node]}", away if expected != ids[node] else 0.0)


def stops(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Each path ends where the draft's confidence falls below the bound, and nowhere else.

    The scores are the draft's own where the backend reveals them, up to the rounding of a law. Rows that it does not
    reveal are the oracle's, and with them the tree is judged once more, up to rule T.
    """
    plan = _plan(case)
    if subject.abilities is not None and not subject.abilities.drafts:
        raise NotApplicable("the engine drafts in its own way")
    for number, step in enumerate(subject(case).steps):
        if step.drafted is None or number in subject.bare:
            continue
        tree = step.drafted.tree
        levels = levels_in_chunk(case, len(step.context), plan.tree.height)
        ids = draft_ids_of(case, step.drafted)
        if ids is None:
            continue  # draft.vocabulary-map and draft.fidelity name the token
        true = scores_below(case, oracle, step.context, tree, levels)
        yield Comparisons(len(tree))
        # A head without a row proposes the bare root, which draft.fidelity judges.
        if true is None:
            continue
        shown_logits = step.drafted.logits
        own_logits: Array = np.full(true.shape, np.nan) if shown_logits is None else shown_logits
        if own_logits.shape != true.shape:
            continue  # draft.fidelity names the shape
        by_head = _true_confidence(case, oracle, step, levels)
        own_confidence = step.drafted.confidence
        size = float(np.max(np.nan_to_num(np.abs(own_logits), posinf=0.0)))
        rounding = ROUNDING[case.dtype] * (1 + size) * max(levels, 1)
        finding = _worst(number, breaches(plan, tree, ids, own_logits, levels, own_confidence), rounding)
        if finding is None:
            filled = np.where(np.isnan(own_logits).any(axis=1, keepdims=True), true, own_logits)
            noise = stop_noise(case, plan, true)
            finding = _worst(number, breaches(plan, tree, ids, filled, levels, by_head), noise)
        if finding is not None:
            yield finding
            return


def compare_stopped_trees(
    name: str, case: Case, oracle: Oracle, number: int, step: Step, true: Drafted, sigma: float | None
) -> Iterator[Fact]:
    """Findings where a tree has wrong scores, or is not what its draft's confidence leaves of it, up to rule T.

    The drafted tree has the right root; `true` is the oracle's. `sigma` is the noise of the draft's scores by its
    control, None for the a-priori one.
    """
    plan = _plan(case)
    drafted = step.drafted
    assert drafted is not None
    yield Comparisons(len(true.tree))
    levels = levels_in_chunk(case, len(step.context), plan.tree.height)
    ids = draft_ids_of(case, drafted)
    scores = None if ids is None else scores_below(case, oracle, step.context, drafted.tree, levels)
    if ids is None or scores is None or plan.rows_in_tree(drafted.tree.children) is None:
        if drafted.tree != true.tree:
            yield tree_finding(name, number, line(true.tree), line(drafted.tree))
        return
    by_head = _true_confidence(case, oracle, step, levels)
    predicted = stop_ties(case, plan, drafted.tree, ids, scores, levels, sigma, by_head)
    every = [
        *breaches(plan, drafted.tree, ids, scores, levels, by_head),
        *(() if is_drawn(case) else wrong_tokens(plan, drafted.tree, ids, scores)),
    ]
    noise = stop_noise(case, plan, scores)
    yield from compare_up_to_ties(name, case, oracle, number, step, true, predicted, noise, lambda: every)


def _true_confidence(case: Case, oracle: Oracle, step: Step, levels: int) -> Array | None:
    """The confidences of the draft's head by definition, where they decide; None where the draft's law does."""
    assert step.drafted is not None
    if _plan(case).when != "head":
        return None
    return confidence_below(case, oracle, step.context, step.drafted.tree, levels)


def stop_noise(case: Case, plan: Stopped, logits: Array) -> float:
    """The largest distance of a confidence from the bound at which noise decides, where `logits` are the draft's.

    Each addend of a log-probability carries the noise of a logit and of the logarithm of a sum.
    """
    return TIE_SIGMA * float(np.sqrt(2 * _addends(plan))) * draft_sigma(case, logits)


def stop_ties(
    case: Case,
    plan: Stopped,
    tree: Tree,
    ids: tuple[int, ...],
    logits: Array,
    levels: int,
    sigma: float | None,
    confidence: Array | None = None,
) -> float:
    """The ties predicted for a tree: ends that noise would move, and tokens that it would exchange."""
    noise = draft_sigma(case, logits) if sigma is None else sigma
    compared = margins(plan, tree, ids, logits, confidence) or {}
    distances = np.array([abs(margin) for node, margin in compared.items() if tree.depth[node] < levels])
    ends = float(ndtr(-distances / (np.sqrt(2 * _addends(plan)) * noise)).sum())
    exchanged = 0.0 if is_drawn(case) else tie_prediction.rank_ties(case, Drafted(tree, logits, ids), sigma)
    # A step has one tie at most.
    return min(1.0, ends + exchanged)


def _addends(plan: Stopped) -> int:
    return max(plan.tree.height, 1) if plan.cumulated else 1


def _worst(number: int, every: Iterator[Breach], noise: float) -> Finding | None:
    """The finding at the breach that lies furthest beyond the noise; None where all lie within it."""
    worst = max(every, key=lambda breach: breach.away, default=None)
    if worst is None or worst.away <= noise:
        return None
    where: dict[str, int | str] = {"node": worst.node, "side": "tree"}
    measure = worst.away / noise if np.isfinite(worst.away) else None
    return Finding(NAME, Stage.DRAFTED, number, where, worst.expected, worst.observed, measure)


def _plan(case: Case) -> Stopped:
    plan = case.draft.stopped
    assert plan is not None
    return plan


INVARIANTS = (
    Invariant(
        NAME,
        "A path of a drafted tree ends where the draft's confidence falls below the bound, and nowhere else.",
        needing(Stage.DRAFTED),
        stops,
        lambda case: case.draft.stopped is not None,
    ),
)
