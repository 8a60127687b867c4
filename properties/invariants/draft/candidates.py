"""The candidates of a selector: the tokens of a slot between which a draft of blocks chooses.

A token at the border of the best may be a candidate or not, by noise. So the scores of an engine are compared on the
candidates that it shows, and here these are compared with the best by the scores of their slot.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from specverify.properties.invariants.draft.scores import draft_sigma, row_excused, scores_of
from specverify.properties.tolerance.ties import TIE_SIGMA
from specverify.properties.verdict.finding import Comparisons, Finding
from specverify.properties.verdict.followed import follow_step
from specverify.properties.verdict.invariant import Fact, Invariant, Oracle, Unobserved, needing
from specverify.properties.verdict.subject import Subject
from specverify.reference.case import Case
from specverify.reference.draft.block import Block
from specverify.reference.trace import Array, Drafted, Stage, Step

NAME = "draft.candidates"


def has_selector(case: Case) -> bool:
    """Whether a selector chooses between the tokens of the draft."""
    return isinstance(case.draft, Block) and case.draft.selects


def with_candidates_of(case: Case, step: Step) -> Case:
    """`case` with a selector that chooses between the candidates that `step` shows, if it shows as many as it must."""
    draft = case.draft
    if not isinstance(draft, Block) or not draft.selects or step.drafted is None:
        return case
    return replace(case, draft=replace(draft, candidates=shown_candidates(case, step.drafted)))


def shown_candidates(case: Case, drafted: Drafted) -> tuple[tuple[int, ...], ...]:
    """The draft ids that can be drafted at each level below the root, by the first node of each level with scores.

    They end at the first level at which no node has scores, or another number of tokens can be drafted than the
    selector has candidates; there are none without a selector.
    """
    draft = case.draft
    if drafted.logits is None or not isinstance(draft, Block) or not draft.selects:
        return ()
    tree = drafted.tree
    by_level: list[tuple[int, ...]] = []
    for level in range(min(tree.height + 1, draft.levels)):
        rows = [
            drafted.logits[node]
            for node in range(len(tree))
            if tree.depth[node] == level and not np.isnan(drafted.logits[node]).any()
        ]
        ids = tuple(np.flatnonzero(~np.isneginf(rows[0])).tolist()) if rows else ()
        if len(ids) != draft.selector_top_k:
            break
        by_level.append(ids)
    return tuple(by_level)


def with_common_candidates(case: Case, first: Drafted, second: Drafted) -> tuple[Drafted, Drafted]:
    """The drafts of two runs, with the scores of the tokens alone that both can draft at a node.

    At the border of the best a rounding exchanges one token for another. Nodes with more exchanged tokens stay as they
    are, and so do drafts without a selector.
    """
    if not has_selector(case) or first.logits is None or second.logits is None:
        return first, second
    if first.logits.shape != second.logits.shape:
        return first, second
    of_first, of_second = ~np.isneginf(first.logits), ~np.isneginf(second.logits)
    exchanged = np.maximum((of_first & ~of_second).sum(axis=1), (of_second & ~of_first).sum(axis=1))
    left_out = (of_first != of_second) & (exchanged <= 1)[:, None]
    if not left_out.any():
        return first, second
    common = [np.where(left_out, -np.inf, logits) for logits in (first.logits, second.logits)]
    return replace(first, logits=common[0]), replace(second, logits=common[1])


def candidates(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """At each node with children the tokens that can be drafted are the best by the scores of their slot."""
    assert isinstance(case.draft, Block)
    plain_case = replace(case, draft=case.draft.without_selector())
    looked = False
    for number, step in enumerate(subject(case).steps):
        drafted = step.drafted
        if drafted is None or drafted.logits is None or len(drafted.tree) == 1:
            continue
        follower = follow_step(case, oracle, step)
        scores = scores_of(plain_case, follower, step.context, drafted.tree)
        if scores is None or scores.shape != drafted.logits.shape:
            continue  # draft.fidelity tells of trees that the draft does not give, and of shapes
        looked = True
        inner_nodes = [node for node in range(len(drafted.tree)) if drafted.tree.children[node]]
        yield Comparisons(len(inner_nodes))
        sigma = draft_sigma(case, scores)
        for node in inner_nodes:
            can_be_drafted = ~np.isneginf(drafted.logits[node])
            gap = border_gap(scores[node], can_be_drafted, case.draft.selector_top_k) / sigma
            limit = TIE_SIGMA * sigma
            if gap > TIE_SIGMA and not row_excused(
                plain_case, follower, step.context, drafted.tree, node, gap / TIE_SIGMA * limit, gap / TIE_SIGMA
            ):
                yield candidates_finding(case, number, node, scores[node], can_be_drafted, gap)
                return
    if not looked:
        raise Unobserved("the backend does not reveal its draft's scores, which show its candidates")


def border_gap(scores: Array, chosen: Array, count: int) -> float:
    """By how much a score outside of the `chosen` tokens exceeds one inside; infinite for another number than `count`.

    Zero or less where the chosen ones are the best.
    """
    if int(chosen.sum()) != count:
        return np.inf
    if chosen.all():
        return 0.0
    return float(scores[~chosen].max() - scores[chosen].min())


def candidates_finding(case: Case, number: int, node: int, scores: Array, chosen: Array, gap: float) -> Finding:
    """The finding that a node has other candidates than the best: their target ids, in ascending order."""
    assert isinstance(case.draft, Block)
    best = np.sort(np.argsort(-scores, kind="stable")[: case.draft.selector_top_k])
    ids = np.array(case.draft.vocabulary or range(len(scores)))
    expected, observed = (tuple(ids[places].tolist()) for places in (best, np.flatnonzero(chosen)))
    where: dict[str, int | str] = {"node": node, "side": "candidates"}
    return Finding(NAME, Stage.DRAFTED, number, where, expected, observed, gap if np.isfinite(gap) else None)


INVARIANTS = (
    Invariant(
        NAME,
        "The tokens between which a draft's selector chooses are the best of their slot.",
        needing(Stage.DRAFTED),
        candidates,
        has_selector,
    ),
)
