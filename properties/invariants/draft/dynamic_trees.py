"""The invariant of dynamic trees, and their comparison up to rule T.

Scores of a path are sums of log-probabilities. Two candidates whose scores lie within the noise of such sums are tied,
and a tree may hold either.
"""

from collections.abc import Iterator

import numpy as np

from properties.invariants.draft import tie_prediction
from properties.invariants.draft.best_nodes import Breach, breaches
from properties.invariants.draft.scores import (
    DRAFT_K,
    draft_sigma,
    line,
    rows_differ,
    scores_below,
    scores_differ,
    tree_differs,
)
from properties.tolerance.closeness import rms
from properties.tolerance.ties import TIE_SIGMA
from properties.verdict.finding import Compared, Finding, PredictedTies, Tie
from properties.verdict.invariant import Fact, Invariant, NotApplicable, Oracle, Unobserved, needing
from properties.verdict.subject import Subject
from reference.architecture import Seeded
from reference.case import Case
from reference.draft_trees import Expansion
from reference.trace import Array, Drafted, Stage, Step
from reference.tree import Tree

NAME = "draft.tree-top-m"

ROUNDING = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1e-5, "float16": 1e-5}
"""Noise of a sum that an engine computes from its own logits, for each level and relative to their size.

Engines in 16 bits add in float32 (`reference.draft_trees.expansion`).
"""


def tree_top_m(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Each dynamic tree holds the best candidates, parents first, by the scores of the draft.

    The scores are the draft's own where the backend reveals them, up to the rounding of their sums. Rows that it does
    not reveal are the oracle's, and with them the tree is judged once more, up to rule T.
    """
    plan = _plan(case)
    if subject.abilities is not None and not subject.abilities.drafts:
        raise NotApplicable("the engine drafts in its own way")
    for number, step in enumerate(subject(case).steps):
        if step.drafted is None or number in subject.bare:
            continue
        tree, left = step.drafted.tree, _levels(case, len(step.context))
        true, ids = _true(case, oracle, step), _ids(case, step.drafted)
        if ids is None:
            continue  # draft.vocabulary-map and draft.fidelity name the token
        yield Compared(len(tree))
        # A head without a row proposes the bare root, which draft.fidelity judges.
        if true is None:
            continue
        shown = step.drafted.logits
        own: Array = np.full(true.shape, np.nan) if shown is None else shown
        if own.shape != true.shape:
            continue  # draft.fidelity names the shape
        sure = ROUNDING[case.dtype] * (1 + float(np.max(np.nan_to_num(np.abs(own))))) * plan.depth
        finding = _worst(number, tree, plan, ids, own, sure, left)
        if finding is None:
            filled = np.where(np.isnan(own).any(axis=1, keepdims=True), true, own)
            finding = _worst(number, tree, plan, ids, filled, tie_noise(case, plan, true), left)
        if finding is not None:
            yield finding
            return


def grown(
    name: str, case: Case, oracle: Oracle, number: int, step: Step, true: Drafted, sigma: float | None
) -> Iterator[Fact]:
    """Findings where a dynamic tree has wrong scores, or is no dynamic tree of its draft's definition up to rule T.

    Args:
        name: Name of the invariant.
        case: The case, whose draft fills a dynamic tree.
        oracle: The oracle.
        number: Index of the step.
        step: The step; its drafted tree has the right root.
        true: The oracle's tree.
        sigma: The noise of the draft's scores, by its control; None for the a-priori one.
    """
    plan, seen = _plan(case), step.drafted
    assert seen is not None
    yield Compared(len(true.tree))
    ids = _ids(case, seen)
    scores = None if ids is None else _true(case, oracle, step)
    if ids is None or scores is None:
        if seen.tree != true.tree:
            yield tree_differs(name, number, line(true.tree), line(seen.tree))
        return
    levels = _levels(case, len(step.context))
    yield PredictedTies(tie_prediction.of_paths(case, plan, seen.tree, ids, scores, levels, sigma))
    if seen.logits is not None:
        yield from rows_differ(name, case, oracle, number, step.context, seen)
    if seen.tree == true.tree:
        return
    noise = tie_noise(case, plan, scores)
    every = list(breaches(plan, seen.tree, ids, scores, noise, levels))
    worst = max(every, key=lambda one: one.away, default=None)
    if worst is not None and worst.away > noise:
        yield tree_differs(name, number, line(true.tree), line(seen.tree))
    else:
        gap = 0.0 if worst is None else max(worst.away, 0.0) / noise * TIE_SIGMA
        yield Tie(name, 0 if worst is None else worst.node, gap)


def common_paths(name: str, case: Case, number: int, seen: Drafted, fresh: Drafted) -> Iterator[Fact]:
    """Findings where two dynamic trees of one backend score a path that both hold unlike.

    Of trees that hold other paths nothing is said: near ties may fall either way.
    """
    if seen.logits is None or fresh.logits is None:
        raise Unobserved("the backend does not reveal its draft's scores")
    places = {fresh.tree.tokens_to(node): node for node in range(len(fresh.tree))}
    sigma = draft_sigma(case, fresh.logits)
    for node in range(len(seen.tree)):
        other = places.get(seen.tree.tokens_to(node))
        if other is None or np.isnan(fresh.logits[other]).all() or np.isnan(seen.logits[node]).all():
            continue
        yield Compared()
        away = float(rms(seen.logits[node] - fresh.logits[other])) / (DRAFT_K * sigma)
        if away > 1:
            yield scores_differ(name, case, number, node, fresh.logits[other], seen.logits[node], away)
            return


def tie_noise(case: Case, plan: Expansion, logits: Array) -> float:
    """The largest distance of two tied path scores, where `logits` [nodes, V] are the draft's.

    Each of the up to `depth` addends of a score carries the noise of a logit and of the logarithm of a sum.
    """
    return TIE_SIGMA * float(np.sqrt(2 * plan.depth)) * draft_sigma(case, logits)


def _worst(
    number: int, tree: Tree, plan: Expansion, ids: tuple[int, ...], logits: Array, noise: float, levels: int
) -> Finding | None:
    """The finding at the breach that lies furthest beyond the noise; None where all lie within it."""
    beyond: list[Breach] = [one for one in breaches(plan, tree, ids, logits, noise, levels) if one.away > noise]
    if not beyond:
        return None
    worst = max(beyond, key=lambda one: one.away)
    where: dict[str, int | str] = {"node": worst.node, "side": "tree"}
    measure = worst.away / noise if np.isfinite(worst.away) else None
    return Finding(NAME, Stage.DRAFTED, number, where, worst.expected, worst.observed, measure)


def _plan(case: Case) -> Expansion:
    plan = case.draft.expansion
    assert plan is not None
    return plan


def _levels(case: Case, position: int) -> int:
    """The levels below a root at `position` that stay where trees are cut at the end of the root's attention chunk."""
    plan = _plan(case)
    if not case.layout.stay_in_chunk:
        return plan.depth
    if not isinstance(case.model, Seeded):
        raise NotApplicable("where the tree was cut is known of built-in models alone")
    chunks = [chunk for _, chunk in case.model.architecture.reaches if chunk]
    return min([plan.depth, *(chunk - 1 - position % chunk for chunk in chunks)])


def _ids(case: Case, seen: Drafted) -> tuple[int, ...] | None:
    """The draft id of each node; None where a token is none that the draft can name, or not the one that its id is."""
    named = case.draft.vocabulary or tuple(range(case.model.vocab_size))
    if set(seen.tree.token[1:]) - set(named):
        return None
    ids = (0, *(named.index(token) for token in seen.tree.token[1:]))
    return None if seen.draft_ids is not None and seen.draft_ids[1:] != ids[1:] else ids


def _true(case: Case, oracle: Oracle, step: Step) -> Array | None:
    """The true scores of the step's nodes that may have children; None where a head has no row."""
    assert step.drafted is not None
    plan = _plan(case)
    levels = min(_levels(case, len(step.context)), plan.outline.height)
    return scores_below(case, oracle, step.context, step.drafted.tree, levels)


def _grows(case: Case) -> bool:
    return case.draft.expansion is not None


INVARIANTS = (
    Invariant(
        NAME,
        "A dynamic tree holds the best candidates by the scores of its draft, and parents come first.",
        needing(Stage.DRAFTED),
        tree_top_m,
        _grows,
    ),
)
