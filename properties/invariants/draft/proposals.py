"""Invariants of proposals: each drafted tree follows from the draft's definition."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from specverify.properties.invariants.applies import is_drawn
from specverify.properties.invariants.draft import tie_prediction
from specverify.properties.invariants.draft.candidates import with_candidates_of, with_common_candidates
from specverify.properties.invariants.draft.confidences import compare_confidences
from specverify.properties.invariants.draft.dynamic_trees import common_paths, compare_dynamic_trees
from specverify.properties.invariants.draft.hidden_states import with_rows_of
from specverify.properties.invariants.draft.scores import (
    DRAFT_K,
    compare_score_rows,
    draft_sigma,
    line,
    reading_scores,
    restarted_case,
    row_excused,
    score_distance,
    scores_finding,
    scores_of,
    tree_finding,
)
from specverify.properties.invariants.draft.stopped_trees import compare_stopped_trees
from specverify.properties.tolerance.ties import TIE_SIGMA
from specverify.properties.verdict.finding import Comparisons, Finding, PredictedTies, Tie
from specverify.properties.verdict.followed import follow_step, shift
from specverify.properties.verdict.invariant import (
    AGAIN,
    Fact,
    Invariant,
    NotApplicable,
    Oracle,
    Unobserved,
    needing,
)
from specverify.properties.verdict.subject import Subject
from specverify.properties.verdict.variants import first_step, pending_root
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.sampling import Sampling
from specverify.reference.trace import Drafted, Stage, Step
from specverify.reference.tree import Tree

NEEDS = needing(Stage.DRAFTED)

BOTH_RUNS = 2**0.5
"""The distance of two runs of the backend, each with the same noise, over that noise."""


def fidelity(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """At every step the draft, which keeps state between steps, proposes the tree that it gives from scratch.

    A step without the draft proposes the root alone. Of a request whose script was made of its own trees the roots are
    compared, which says nothing of its drafts: that is no answer, unless nobody could know them.
    """
    drafts_itself = subject.abilities is not None and not subject.abilities.drafts
    for number, step in enumerate(subject(case).steps):
        if step.drafted is None:
            continue
        pending = pending_root(case, subject, number)
        if subject.retold:
            if subject.roots_alone:
                yield Comparisons()
            yield from compare_root("draft.fidelity", number, step.drafted.tree, pending)
        elif number in subject.bare:
            yield from compare_bare_step("draft.fidelity", number, step.drafted.tree, pending)
        else:
            sigma = None if drafts_itself else _control_sigma(case, oracle, subject)
            parted = False
            for fact in compare_proposal(
                "draft.fidelity", case, oracle, number, step, number, pending, drafts_itself, sigma
            ):
                parted |= isinstance(fact, Finding)
                yield fact
            # Confidences follow from the tokens of the tree: those of a wrong tree tell nothing more.
            if not (drafts_itself or parted):
                yield from compare_confidences("draft.fidelity", case, oracle, number, step)
    if subject.unknown:
        raise Unobserved("the trace does not tell which steps asked the draft, or the sizes of its batches")
    if subject.retold and not subject.roots_alone:
        raise NotApplicable("draft.switched and draft.shared judge the drafts of such a request")


def compare_root(name: str, number: int, tree: Tree, pending: int) -> Iterator[Finding]:
    """A finding where the root of a drafted tree is not the pending one."""
    if tree.token[0] != pending:
        yield Finding(name, Stage.DRAFTED, number, {"node": 0, "side": "root"}, pending, tree.token[0])


def compare_bare_step(name: str, number: int, tree: Tree, pending: int) -> Iterator[Fact]:
    """Findings where a step without its draft proposes more than the pending root."""
    yield Comparisons()
    yield from compare_root(name, number, tree, pending)
    if len(tree) > 1:
        yield tree_finding(name, number, line(Tree((0,), (pending,))), line(tree))


def compare_proposal(
    name: str,
    case: Case,
    oracle: Oracle,
    number: int,
    step: Step,
    place: int,
    pending: int,
    drafts_itself: bool = False,
    sigma: float | None = None,
) -> Iterator[Fact]:
    """Findings where the tree of `step` is not what the draft of `case` gives; a script gives its tree `place`.

    If the engine `drafts_itself`, in its own way, only the root is compared. `sigma` is the noise of the draft's
    scores, by its control; None where no control was run.
    """
    assert step.drafted is not None
    case = with_candidates_of(with_rows_of(case, step), step)
    oracle = follow_step(case, oracle, step)
    yield Comparisons()
    wrong = list(compare_root(name, number, step.drafted.tree, pending))
    if wrong or drafts_itself:
        yield from wrong
        return
    script = case.draft.trees
    if script is not None:
        expected_tree = (script[place] if place < len(script) else Tree((0,), (pending,))).with_root(pending)
        # The engine cuts trees at the end of an attention chunk; the oracle shows the cut tree.
        if case.layout.stay_in_chunk:
            script_case = replace(case, draft=Scripted((expected_tree,)), sampling=Sampling())
            cut = oracle(restarted_case(script_case, (*step.context, pending))).steps[0].drafted
            assert cut is not None
            expected_tree = cut.tree
        yield Comparisons(len(expected_tree))
        if expected_tree != step.drafted.tree:
            yield tree_finding(name, number, line(expected_tree), line(step.drafted.tree))
        return
    logits = step.drafted.logits
    # A head proposes the bare root, without scores, where it has no row.
    if case.draft.has_law and logits is not None:
        size = len(step.drafted.tree), len(case.draft.vocabulary) or case.model.vocab_size
        if logits.shape != size:
            yield Finding(name, Stage.DRAFTED, number, {"side": "shape"}, str(size), str(logits.shape))
            return
    if is_drawn(case):
        if case.draft.model is None and case.draft.with_fixed_tree(step.drafted.tree) is None:
            observed = line(step.drafted.tree)
            yield tree_finding(name, number, f"a tree that {case.draft.description} admits", observed)
            return
        yield from compare_score_rows(name, case, oracle, number, step.context, step.drafted)
        return
    true = oracle(restarted_case(case, (*step.context, pending), number)).steps[0].drafted
    assert true is not None
    if case.draft.expansion is not None:
        yield from compare_dynamic_trees(name, case, oracle, number, step, true, sigma)
        return
    if case.draft.stopped is not None:
        yield from compare_stopped_trees(name, case, oracle, number, step, true, sigma)
        return
    tree = step.drafted.tree

    def excused(node: int, distance: float, away: float) -> bool:
        return row_excused(case, oracle, step.context, tree, node, distance, away)

    yield from _compare_drafted(name, case, number, step.drafted, true, sigma, excused, step.context)


def _control_sigma(case: Case, oracle: Oracle, subject: Subject) -> float | None:
    """The noise of the draft's scores; None for a draft without any, and where only scores are compared."""
    if not case.draft.has_law or is_drawn(case):
        return None
    return tie_prediction.control_sigma(case, oracle, subject)


def _compare_drafted(
    name: str,
    case: Case,
    number: int,
    drafted: Drafted,
    true: Drafted,
    sigma: float | None,
    excused: Callable[[int, float, float], bool] = lambda node, distance, away: False,
    context: tuple[int, ...] = (),
) -> Iterator[Fact]:
    """Findings where `drafted` is not `true`; tokens whose scores differ by less than their noise are ties.

    `sigma` is the noise by which ties are predicted.
    `excused` says of the scores at a node, by their distance and by how many times that is what it may be, whether the
    models' conditioning explains them.
    """
    yield Comparisons(len(true.tree))
    yield PredictedTies(tie_prediction.rank_ties(case, true, sigma))
    if drafted.tree.parent != true.tree.parent:
        yield tree_finding(name, number, line(true.tree), line(drafted.tree))
        return
    by_depth = sorted(range(len(true.tree)), key=lambda node: true.tree.depth[node])
    for node in by_depth:
        # The token before the scores: a node with another token, by a tie, scores its children differently.
        if drafted.tree.token[node] != true.tree.token[node]:
            gap = _gap(case, true, drafted, node)
            if gap is None or gap > TIE_SIGMA:
                expected_token, drafted_token = true.tree.token[node], drafted.tree.token[node]
                yield Finding(
                    name, Stage.DRAFTED, number, {"node": node, "side": "token"}, expected_token, drafted_token, gap
                )
            else:
                yield Tie(name, node, gap)
            return
        if drafted.logits is not None and true.logits is not None and not np.isnan(true.logits[node]).all():
            limit = DRAFT_K * draft_sigma(case, true.logits)
            # A NaN where the oracle has a number counts as an infinite distance.
            away = score_distance(drafted.logits[node], true.logits[node]) / limit
            distance = away * limit
            if away > 1 and not excused(node, distance, away):
                finding = scores_finding(name, case, number, node, true.logits[node], drafted.logits[node], away)
                yield reading_scores(finding, case, context, true.tree, node, limit)
                return


def _gap(case: Case, true: Drafted, drafted: Drafted, node: int) -> float | None:
    """The distance, in sigmas, of the wanted and the drafted token's scores at the parent; None without scores."""
    if true.logits is None or true.draft_ids is None or drafted.draft_ids is None:
        return None
    row = true.logits[true.tree.parent[node]]
    width = len(row)
    if not 0 <= drafted.draft_ids[node] < width:
        return None
    return float(abs(row[true.draft_ids[node]] - row[drafted.draft_ids[node]]) / draft_sigma(case, true.logits))


def rollback(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """After steps that accept and reject, the draft proposes the tree that a fresh start at the same tokens gives."""
    steps = subject(case).steps
    drafting_steps = [number for number in range(len(steps)) if number not in subject.bare]
    if is_drawn(case):
        raise NotApplicable("a fresh start would draw other tokens; draft.fidelity compares the scores")
    if not drafting_steps or drafting_steps[-1] == 0:
        raise NotApplicable("nothing was rolled back before the only step that asked the draft")
    number = drafting_steps[-1]
    step = steps[number]
    if step.drafted is None:
        raise Unobserved("the backend does not reveal the tree of its last step")
    if step.drafted.given is not None and step.drafted.given.own_rows:
        raise NotApplicable(
            "the head keeps rows of accepted nodes, which a fresh start runs beside the target's states"
        )
    restarted = restarted_case(case, (*step.context, step.drafted.tree.token[0]), number)
    # Its prefill too gives the draft what it reads.
    fresh_step = first_step(subject(restarted))
    if fresh_step.drafted is None:
        raise Unobserved("the backend does not reveal the tree of a fresh start")
    moved = _with_choices_of(case, oracle, step, fresh_step)
    drafted, fresh = with_common_candidates(case, step.drafted, moved)
    if drafted is not step.drafted and drafted.tree != fresh.tree:
        raise NotApplicable("a token at the border of the best was a candidate in one run, and one run drafted it")
    context, tree = step.context, step.drafted.tree

    def excused(node: int, distance: float, away: float) -> bool:
        return row_excused(case, oracle, context, tree, node, distance / BOTH_RUNS, away)

    by_scores = case.draft.expansion is not None or case.draft.stopped is not None
    if by_scores and fresh.tree != tree:
        yield from common_paths("draft.rollback", case, number, step.drafted, fresh, excused)
        return
    if moved is not fresh_step.drafted and drafted.tree != fresh.tree:
        raise NotApplicable("the target's rows chose otherwise at a border, and the draft's tokens followed")
    sigma = _control_sigma(case, oracle, subject)
    yield from _compare_drafted(
        "draft.rollback", case, number, drafted, fresh, sigma and BOTH_RUNS * sigma, excused, context
    )


def _with_choices_of(case: Case, oracle: Oracle, step: Step, fresh_step: Step) -> Drafted:
    """The draft of `fresh_step`, with the scores that it must have if its target's rows choose as those of `step`.

    A prefill may take another expert, column or code at a border than the steps took before (`verdict.followed`). By so
    much as the oracle's draft, which reads the target's states, moves with it, the scores must move.
    """
    drafted = fresh_step.drafted
    assert drafted is not None
    if drafted.logits is None or shift(case, oracle, fresh_step, step) is None:
        return drafted
    context, tree = fresh_step.context, drafted.tree
    followers = [follow_step(case, oracle, followed) for followed in (fresh_step, step)]
    own_scores, moved_scores = (
        scores_of(with_candidates_of(case, fresh_step), follower, context, tree) for follower in followers
    )
    if own_scores is None or moved_scores is None or own_scores.shape != drafted.logits.shape:
        return drafted
    can_be_drafted = ~np.isneginf(drafted.logits)
    movement = np.subtract(moved_scores, own_scores, out=np.zeros(own_scores.shape), where=can_be_drafted)
    return replace(drafted, logits=drafted.logits + movement)


def vocabulary_map(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Each drafted token is the target id to which the vocabulary map sends the node's draft id."""
    vocabulary = case.draft.vocabulary
    for number, step in enumerate(subject(case).steps):
        if step.drafted is None or step.drafted.draft_ids is None:
            continue
        yield Comparisons(len(step.drafted.tree) - 1)
        for node, (token, draft_id) in enumerate(zip(step.drafted.tree.token, step.drafted.draft_ids, strict=True)):
            if node == 0:
                continue
            expected = vocabulary[draft_id] if 0 <= draft_id < len(vocabulary) else f"an id below {len(vocabulary)}"
            if token != expected:
                where: dict[str, int | str] = {"node": node, "side": f"draft id {draft_id}"}
                yield Finding("draft.vocabulary-map", Stage.DRAFTED, number, where, expected, token)


INVARIANTS = (
    Invariant(
        "draft.fidelity",
        "At every step the draft proposes what its definition gives from scratch for the tokens so far.",
        NEEDS,
        fidelity,
    ),
    Invariant(
        "draft.rollback",
        "After rejections the draft proposes what a fresh start at the same tokens would.",
        NEEDS,
        rollback,
        lambda case: case.draft.trees is None,
        every_again=AGAIN,
    ),
    Invariant(
        "draft.vocabulary-map",
        "A draft with a reduced vocabulary names exactly the target ids its map says.",
        NEEDS,
        vocabulary_map,
        lambda case: bool(case.draft.vocabulary),
    ),
)
