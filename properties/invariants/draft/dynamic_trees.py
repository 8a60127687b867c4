"""The invariant of dynamic trees, and their comparison up to rule T.

Scores of a path are sums of log-probabilities. Two candidates whose scores lie within the noise of such sums are tied,
and a tree may hold either. `breaches` reads the draft's scores at the nodes of the tree alone. They suffice, since a
candidate scores no more than its parent: the children of a node that the tree does not hold cannot be better than that
node.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from specverify.properties.invariants.draft import tie_prediction
from specverify.properties.invariants.draft.scores import (
    DRAFT_K,
    compare_score_rows,
    draft_sigma,
    line,
    scores_below,
    scores_finding,
    tree_finding,
)
from specverify.properties.tolerance.closeness import rms
from specverify.properties.tolerance.ties import TIE_SIGMA
from specverify.properties.verdict.finding import Comparisons, Finding, PredictedTies, Reads, Tie
from specverify.properties.verdict.head_routing import has_tied_row
from specverify.properties.verdict.invariant import Fact, Invariant, NotApplicable, Oracle, Unobserved, needing
from specverify.properties.verdict.subject import Subject
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft_trees import Expansion
from specverify.reference.trace import Array, Drafted, Stage, Step
from specverify.reference.tree import Tree


@dataclass(frozen=True)
class Breach:
    """A way in which a tree may not be the dynamic tree of its draft.

    Attributes:
        node: The node at which it shows.
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

    The draft's scores `logits` [nodes, draft vocabulary] have rows of NaN where they are unknown, of which nothing is
    said. Up to the distance `noise` of two path scores either may be the better one. The tree was left with so many
    `levels`; those below were cut at the end of an attention chunk.
    """
    wrong = next(_disorder(plan, tree, ids, min(levels, plan.depth)), None)
    if wrong is not None:
        yield wrong
        return
    laws = [log_law(row) for row in logits]
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


def log_law(logits: Array) -> Array:
    """The log-probabilities of logits [V], at most 0; NaN where the logits are unknown."""
    row = np.asarray(logits, dtype=np.float64)
    shifted = row - row.max()
    law: Array = np.minimum(shifted - np.log(np.exp(shifted).sum()), 0.0)
    return law


NAME = "draft.tree-top-m"

ROUNDING = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1e-5, "float16": 1e-5}
"""Noise of a sum that an engine computes from its own logits, for each level and relative to their size.

Engines in 16 bits add in float32 (`specverify.reference.draft_trees`).
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
        tree = step.drafted.tree
        levels = levels_in_chunk(case, len(step.context), _plan(case).depth)
        true = _true_scores(case, oracle, step)
        ids = draft_ids_of(case, step.drafted)
        if ids is None:
            continue  # draft.vocabulary-map and draft.fidelity name the token
        yield Comparisons(len(tree))
        # A head without a row proposes the bare root, which draft.fidelity judges.
        if true is None:
            continue
        shown_logits = step.drafted.logits
        own_logits: Array = np.full(true.shape, np.nan) if shown_logits is None else shown_logits
        if own_logits.shape != true.shape:
            continue  # draft.fidelity names the shape
        rounding = ROUNDING[case.dtype] * (1 + float(np.max(np.nan_to_num(np.abs(own_logits))))) * plan.depth
        finding = _worst(number, tree, plan, ids, own_logits, rounding, levels)
        if finding is None:
            filled = np.where(np.isnan(own_logits).any(axis=1, keepdims=True), true, own_logits)
            finding = _worst(number, tree, plan, ids, filled, tie_noise(case, plan, true), levels)
            if finding is not None and _reads_tied_experts(case, oracle, step, own_logits):
                continue  # a row that is not revealed may be that of other experts
        if finding is not None:
            yield finding
            return


def _reads_tied_experts(case: Case, oracle: Oracle, step: Step, own_logits: Array) -> bool:
    """Whether a head's scores at some node of `step` that are not among `own_logits` depend on a tie of its experts."""
    assert step.drafted is not None
    tree = step.drafted.tree
    hidden_nodes = np.flatnonzero(np.isnan(own_logits).any(axis=1))
    return any(
        has_tied_row(oracle, Reads(case, step.context, tree, int(node), None, 0.0, lambda oracle: None, by_head=True))
        for node in hidden_nodes
    )


def compare_dynamic_trees(
    name: str, case: Case, oracle: Oracle, number: int, step: Step, true: Drafted, sigma: float | None
) -> Iterator[Fact]:
    """Findings where a dynamic tree has wrong scores, or is no dynamic tree of its draft's definition up to rule T.

    The drafted tree has the right root; `true` is the oracle's. `sigma` is the noise of the draft's scores by its
    control, None for the a-priori one.
    """
    plan = _plan(case)
    drafted = step.drafted
    assert drafted is not None
    yield Comparisons(len(true.tree))
    ids = draft_ids_of(case, drafted)
    scores = None if ids is None else _true_scores(case, oracle, step)
    if ids is None or scores is None:
        if drafted.tree != true.tree:
            yield tree_finding(name, number, line(true.tree), line(drafted.tree))
        return
    levels = levels_in_chunk(case, len(step.context), _plan(case).depth)
    predicted = tie_prediction.path_ties(case, plan, drafted.tree, ids, scores, levels, sigma)
    noise = tie_noise(case, plan, scores)
    every = partial(breaches, plan, drafted.tree, ids, scores, noise, levels)
    yield from compare_up_to_ties(name, case, oracle, number, step, true, predicted, noise, every)


def compare_up_to_ties(
    name: str,
    case: Case,
    oracle: Oracle,
    number: int,
    step: Step,
    true: Drafted,
    predicted: float,
    noise: float,
    every: Callable[[], Iterable[Breach]],
) -> Iterator[Fact]:
    """Findings where a tree that follows from its draft's scores has wrong scores, or is none that they allow.

    Args:
        name: The invariant.
        case: The case.
        oracle: The oracle.
        number: The number of the step.
        step: The step, whose drafted tree has the right root.
        true: The oracle's proposal.
        predicted: The ties predicted for the tree.
        noise: The distance up to which a breach is a tie.
        every: The breaches of the drafted tree by the true scores; they are asked where the trees differ.
    """
    drafted = step.drafted
    assert drafted is not None
    yield PredictedTies(predicted)
    if drafted.logits is not None:
        facts = list(compare_score_rows(name, case, oracle, number, step.context, drafted))
        yield from facts
        # A tree that follows from other scores is no difference of its own.
        if any(isinstance(fact, Finding) for fact in facts):
            return
    if drafted.tree == true.tree:
        return
    worst = max(every(), key=lambda breach: breach.away, default=None)
    if worst is not None and worst.away > noise:
        yield tree_finding(name, number, line(true.tree), line(drafted.tree))
    else:
        gap = 0.0 if worst is None else max(worst.away, 0.0) / noise * TIE_SIGMA
        yield Tie(name, 0 if worst is None else worst.node, gap)


def common_paths(
    name: str,
    case: Case,
    number: int,
    drafted: Drafted,
    fresh: Drafted,
    excused: Callable[[int, float, float], bool],
) -> Iterator[Fact]:
    """Findings where two dynamic trees of one backend score a path that both hold unlike.

    Of trees that hold other paths nothing is said: near ties may fall either way. `excused` says of the scores at a
    node of `drafted`, by their distance and by how many times that is what it may be, whether the models' conditioning
    explains them.
    """
    if drafted.logits is None or fresh.logits is None:
        raise Unobserved("the backend does not reveal its draft's scores")
    places = {fresh.tree.tokens_to(node): node for node in range(len(fresh.tree))}
    sigma = draft_sigma(case, fresh.logits)
    for node in range(len(drafted.tree)):
        fresh_node = places.get(drafted.tree.tokens_to(node))
        if fresh_node is None or np.isnan(fresh.logits[fresh_node]).all() or np.isnan(drafted.logits[node]).all():
            continue
        yield Comparisons()
        distance = float(rms(drafted.logits[node] - fresh.logits[fresh_node]))
        away = distance / (DRAFT_K * sigma)
        if away > 1 and not excused(node, distance, away):
            yield scores_finding(name, case, number, node, fresh.logits[fresh_node], drafted.logits[node], away)
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
    beyond_noise: list[Breach] = [
        breach for breach in breaches(plan, tree, ids, logits, noise, levels) if breach.away > noise
    ]
    if not beyond_noise:
        return None
    worst = max(beyond_noise, key=lambda breach: breach.away)
    where: dict[str, int | str] = {"node": worst.node, "side": "tree"}
    measure = worst.away / noise if np.isfinite(worst.away) else None
    return Finding(NAME, Stage.DRAFTED, number, where, worst.expected, worst.observed, measure)


def _plan(case: Case) -> Expansion:
    plan = case.draft.expansion
    assert plan is not None
    return plan


def levels_in_chunk(case: Case, position: int, levels: int) -> int:
    """The number of the `levels` below a root at `position` that stay where trees are cut at the end of its chunk."""
    if not case.layout.stay_in_chunk:
        return levels
    if not isinstance(case.model, Seeded):
        raise NotApplicable("where the tree was cut is known of built-in models alone")
    chunks = [chunk for _, chunk in case.model.architecture.reaches if chunk]
    return min([levels, *(chunk - 1 - position % chunk for chunk in chunks)])


def draft_ids_of(case: Case, drafted: Drafted) -> tuple[int, ...] | None:
    """The draft id of each node; None where a token is none that the draft can name, or not the one that its id is."""
    vocabulary = case.draft.vocabulary or tuple(range(case.model.vocab_size))
    if set(drafted.tree.token[1:]) - set(vocabulary):
        return None
    ids = (0, *(vocabulary.index(token) for token in drafted.tree.token[1:]))
    return None if drafted.draft_ids is not None and drafted.draft_ids[1:] != ids[1:] else ids


def _true_scores(case: Case, oracle: Oracle, step: Step) -> Array | None:
    """The true scores of the step's nodes that may have children; None where a head has no row."""
    assert step.drafted is not None
    plan = _plan(case)
    levels = min(levels_in_chunk(case, len(step.context), _plan(case).depth), plan.outline.height)
    return scores_below(case, oracle, step.context, step.drafted.tree, levels)


INVARIANTS = (
    Invariant(
        NAME,
        "A dynamic tree holds the best candidates by the scores of its draft, and parents come first.",
        needing(Stage.DRAFTED),
        tree_top_m,
        lambda case: case.draft.expansion is not None,
    ),
)
