"""The candidates of a selector: other ones than the best are found, a tie at the border is none, and scores go on."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from specverify.backends.compositions import open_cpu
from specverify.properties.invariants.draft.candidates import border_gap, shown_candidates
from specverify.properties.verdict.judge import judge
from specverify.properties.verdict.subject import Subject
from specverify.reference.case import Case
from specverify.reference.draft.block import Block
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.layer_head import HeadLayer
from specverify.reference.draft_trees import Expansion
from specverify.reference.malformed import Malformed
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.trace import Array, Trace
from specverify.reference.tree import RankTree
from specverify.setup.subjects import subject_of
from tests.corruption import BY_NAME, ORACLE
from tests.models import LLAMA

DRAFT = Block(
    RankTree((0, 0, 0, 1, 3), (0, 0, 1, 0, 0)), HiddenStates((-1, 1)), HeadLayer(2, 1, 4, 12), 4, 16,
    selector_rank=2, selector_top_k=3, conv_taps=2, conv_group=4,
)  # fmt: skip
CASE = Case(LLAMA, (3, 1, 4, 1, 5), DRAFT, stops=Stops(4), dtype="float64")
CHECKS = tuple(BY_NAME[name] for name in ("draft.candidates", "draft.fidelity", "draft.rollback"))


def swapped(row: Array, place: int) -> Array:
    """The row with its worst candidate exchanged for the token that is `place` places behind the best left out."""
    plain = ORACLE(replace(CASE, draft=DRAFT.without_selector())).steps[0].drafted
    assert plain is not None
    assert plain.logits is not None
    order = np.argsort(-plain.logits[0], kind="stable")
    changed: Array = row.copy()
    count = DRAFT.selector_top_k
    changed[order[count + place]] = row[order[count - 1]]
    changed[order[count - 1]] = -np.inf
    return changed


def changed_subject(change: Callable[[Array], Array]) -> Subject:
    """Our engine, whose draft's scores at the root of the first step are changed."""
    clean = subject_of(open_cpu())

    def run(case: Case) -> Trace:
        trace = clean(case)
        first = trace.steps[0]
        assert first.drafted is not None
        assert first.drafted.logits is not None
        logits = first.drafted.logits.copy()
        logits[0] = change(logits[0])
        drafted = replace(first.drafted, logits=logits)
        return replace(trace, steps=(replace(first, drafted=drafted), *trace.steps[1:]))

    return Subject("changed", run, clean.reveals)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_right_selector_agrees(dtype: str, temperature: float) -> None:
    case = replace(CASE, dtype=dtype, sampling=Sampling(temperature))
    verdict = judge(case, CHECKS, ORACLE, subject_of(open_cpu()))
    assert verdict.findings == ()
    assert verdict.outcomes["draft.candidates"] == "checked"
    assert verdict.outcomes["draft.fidelity"] == "checked"


def test_a_token_beyond_the_border_is_named_beside_the_best() -> None:
    verdict = judge(CASE, CHECKS, ORACLE, changed_subject(lambda row: swapped(row, 4)))
    finding = next(finding for finding in verdict.findings if finding.invariant == "draft.candidates")
    assert finding.where == {"node": 0, "side": "candidates"}
    assert isinstance(finding.expected, tuple)
    assert isinstance(finding.observed, tuple)
    assert len(set(finding.expected) - set(finding.observed)) == 1


def test_a_fresh_start_may_exchange_one_token_at_the_border_and_no_more() -> None:
    def exchange(row: Array, count: int) -> Array:
        order = np.argsort(-row, kind="stable")
        changed: Array = row.copy()
        others = np.flatnonzero(np.isneginf(row))[:count]
        for token, other in zip(order[DRAFT.selector_top_k - count : DRAFT.selector_top_k], others, strict=True):
            changed[other], changed[token] = row[token], -np.inf
        return changed

    rollback = (BY_NAME["draft.rollback"],)
    for count, outcome in ((1, "checked"), (2, "failed")):
        subject = changed_subject(partial(exchange, count=count))
        assert judge(CASE, rollback, ORACLE, subject).outcomes["draft.rollback"] == outcome


def test_one_candidate_more_or_less_is_found() -> None:
    for change in (lambda row: np.where(row == row.max(), -np.inf, row), lambda row: np.nan_to_num(row, neginf=-9.0)):
        verdict = judge(CASE, CHECKS, ORACLE, changed_subject(change))
        assert {"draft.candidates", "draft.fidelity"} <= {finding.invariant for finding in verdict.findings}


def test_a_gap_at_the_border_is_that_of_brute_force() -> None:
    draw = np.random.default_rng(1)
    for _ in range(200):
        scores = draw.integers(0, 4, size=6).astype(float)
        chosen = np.zeros(6, dtype=bool)
        chosen[draw.choice(6, size=3, replace=False)] = True
        worst = max(out - into for out in scores[~chosen] for into in scores[chosen])
        assert border_gap(scores, chosen, 3) == worst
        assert (worst <= 0) == (sorted(scores[chosen]) == sorted(scores)[3:])
        assert border_gap(scores, chosen, 4) == np.inf
    assert border_gap(np.zeros(3), np.ones(3, dtype=bool), 3) == 0.0


def test_candidates_of_an_engine_are_scored_in_place_of_the_best() -> None:
    trace = subject_of(open_cpu())(CASE)
    drafted = trace.steps[0].drafted
    assert drafted is not None
    sets = shown_candidates(CASE, drafted)
    assert [len(ids) for ids in sets] == [3, 3, 3]
    others = tuple(tuple(sorted({*range(5)} - {*ids}))[:3] for ids in sets)
    scored = ORACLE(replace(CASE, draft=replace(DRAFT, candidates=others), steps=1)).steps[0].drafted
    assert scored is not None
    assert shown_candidates(CASE, scored)[0] == others[0]


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(Malformed, match=r"selector_top_k.*3, and selector_rank is 0"):
        replace(DRAFT, selector_rank=0)
    with pytest.raises(Malformed, match="no published draft has both"):
        replace(DRAFT, markov_rank=2)
    with pytest.raises(Malformed, match="a selector beside a dynamic tree"):
        replace(DRAFT, shape=Expansion(2, 2, 4))
    with pytest.raises(Malformed, match=r"conv_group.*0 channels in a group, and 2 taps"):
        replace(DRAFT, conv_group=0)
    with pytest.raises(Malformed, match="does not divide the 16 channels"):
        replace(CASE, draft=replace(DRAFT, conv_group=3))
    with pytest.raises(Malformed, match="rank 3 needs more than the 3 tokens"):
        replace(CASE, draft=replace(DRAFT, shape=RankTree((0, 0), (0, 3))))
    with pytest.raises(Malformed, match=r"candidates\[0\]"):
        replace(DRAFT, candidates=((1, 2),))
