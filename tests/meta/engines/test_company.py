"""`acceptance.company-independent`: a draft that is degraded beside others or under overlap, where texts are right."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specverify.adapt import Chains
from specverify.backends import faults
from specverify.backends.admission import Misshapen, check_declaration
from specverify.backends.compositions import open_engine
from specverify.cli import main
from specverify.properties.invariants import ALL
from specverify.properties.invariants.acceptance import company
from specverify.properties.invariants.acceptance.company import PAIRS, PAIRS_IN_DOUBT
from specverify.properties.laws.accepted_counts import Rates
from specverify.properties.laws.cut_chains import is_possible
from specverify.properties.laws.paired_counts import PairedCounts, log_evidence_of_pairs
from specverify.properties.strategies.draft.language_model import CHAIN
from specverify.properties.verdict.finding import Verdict
from specverify.properties.verdict.judge import judge
from specverify.properties.verdict.subject import Subject
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel, Scripted
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.trace import Array, Speculated, Stage, Trace
from specverify.reference.tree import RankTree
from specverify.setup.subjects import subject_of
from tests.inprocess import in_this_process
from tests.models import LLAMA
from tests.strangers.counted_batches import DEGRADED, HONEST, LENGTH, OVERLAP, counted_batches

NAME = "acceptance.company-independent"
ASKED = tuple(
    invariant for invariant in ALL if invariant.name in (NAME, "lossless.greedy-match", "lossless.distribution")
)
DRAFT = LanguageModel(replace(LLAMA, noise=0.1), CHAIN)
ALONE = Case(LLAMA, (4, 1, 4), DRAFT, stops=Stops(24))
ADD = tuple(Action("add", (number,)) for number in range(4))
MATES = (Mate((3, 2, 7, 1), DRAFT, stops=Stops(16)), Mate((5, 9), DRAFT, stops=Stops(20)))
TOGETHER = replace(ALONE, session=Session(MATES, (ADD[0], Action("step", (0,)), *ADD[1:3]), continuous=True))
OVERLAPPED = replace(ALONE, session=Session((), ADD[:1], continuous=True, setting=OVERLAP))
FIXED = Chains(LENGTH, "best", "match")
ORACLE = Oracle()

SAMPLED_FAULTS = ("accepts less", "state of another")

PROMISES: dict[str, dict[str, Any]] = {
    "a length of chains": {"chains": FIXED},
    "drafts by its own text": {"own_drafts": True},
}


def verdict_of(backend: Callable[[], Any], case: Case) -> Verdict:
    return judge(case, ASKED, ORACLE, subject_of(backend()))


def sampled(case: Case, temperature: float = 0.5) -> Case:
    assert case.session is not None
    mates = tuple(replace(mate, sampling=Sampling(temperature, seed=7)) for mate in case.session.mates)
    return replace(case, sampling=Sampling(temperature, seed=3), session=replace(case.session, mates=mates))


@pytest.mark.parametrize("promise", PROMISES)
@pytest.mark.parametrize("case", [TOGETHER, OVERLAPPED], ids=["together", "overlapped"])
def test_a_right_engine_accepts_beside_others_what_it_accepts_alone(promise: str, case: Case) -> None:
    verdict = verdict_of(counted_batches(**PROMISES[promise]), case)
    assert verdict.agreed, verdict.first
    assert verdict.outcomes[NAME] == "checked"
    assert verdict.compared[NAME] > 10


SIDES = {
    "state of another": "less is accepted beside other requests",
    "positions off": "less is accepted beside other requests",
    "stale under overlap": "less is accepted in the setting overlap",
    "accepts less": "less is accepted beside other requests",
    "bonus counted": "more is accepted beside other requests",
}


@pytest.mark.parametrize("promise", PROMISES)
@pytest.mark.parametrize("fault", DEGRADED)
def test_a_draft_that_is_degraded_beside_others_is_found_by_its_counts_alone(fault: str, promise: str) -> None:
    case = OVERLAPPED if "overlap" in fault else TOGETHER
    verdict = verdict_of(counted_batches(fault, **PROMISES[promise]), case)
    finding = verdict.findings[0]
    assert (finding.invariant, finding.stage, finding.where["side"]) == (NAME, Stage.ACCEPTED, SIDES[fault])
    assert {finding.invariant for finding in verdict.findings} == {NAME}


@pytest.mark.parametrize(
    ("way", "promised"),
    [
        *((way, {}) for way in HONEST),
        ("shorter in batches", {"chains": FIXED}),
        ("bare beside others", {"chains": FIXED}),
    ],
)
def test_another_way_to_draft_beside_others_is_no_finding(way: str, promised: dict[str, Any]) -> None:
    verdict = verdict_of(counted_batches(way, **promised), TOGETHER)
    assert verdict.agreed, verdict.first
    assert verdict.outcomes[NAME] == "unobserved"


@pytest.mark.parametrize("way", HONEST)
def test_whoever_promises_drafts_by_its_own_text_owes_equal_proposals(way: str) -> None:
    verdict = verdict_of(counted_batches(way, own_drafts=True), TOGETHER)
    assert {finding.invariant for finding in verdict.findings} == {NAME}


def test_nothing_is_owed_in_a_setting_that_cuts_drafts() -> None:
    fault = "stale under overlap"
    assert verdict_of(counted_batches(fault, own_drafts=True), OVERLAPPED).outcomes[NAME] == "failed"
    cut = counted_batches(fault, own_drafts=True, cutting_settings=(OVERLAP,))
    assert verdict_of(cut, OVERLAPPED).outcomes[NAME] == "unobserved"
    assert verdict_of(cut, sampled(OVERLAPPED)).outcomes[NAME] == "unobserved"
    degraded = counted_batches("state of another", own_drafts=True, cutting_settings=(OVERLAP,))
    assert verdict_of(degraded, TOGETHER).outcomes[NAME] == "failed"


@pytest.mark.parametrize("wrong", [("prefix-cache",), [OVERLAP], OVERLAP])
def test_a_setting_that_cuts_drafts_is_one_of_the_settings(wrong: Any) -> None:
    declaration = replace(counted_batches()().declaration, cutting_settings=wrong)
    with pytest.raises(Misshapen, match=r"declaration\.cutting_settings"):
        check_declaration(declaration)


@pytest.mark.parametrize(
    "fault", ["", *(pytest.param(fault, marks=pytest.mark.slow) for fault in SAMPLED_FAULTS[1:]), SAMPLED_FAULTS[0]]
)
def test_sampled_requests_are_compared_by_their_shares(fault: str) -> None:
    verdict = verdict_of(counted_batches(fault, chains=FIXED), sampled(TOGETHER))
    evidence = next(test for test in verdict.evidence if test.invariant == NAME)
    if fault:
        (finding,) = verdict.findings
        assert (finding.invariant, finding.stage) == (NAME, Stage.ACCEPTED)
        assert "less is accepted" in str(finding.where["side"])
        assert PAIRS < evidence.rounds <= PAIRS_IN_DOUBT
    else:
        assert verdict.agreed
        assert verdict.outcomes[NAME] == "checked"
        assert evidence.rounds == PAIRS
        assert evidence.log_e < 3.0


def test_sampled_requests_of_an_engine_that_promises_nothing_are_unobserved() -> None:
    verdict = verdict_of(counted_batches("accepts less"), sampled(TOGETHER))
    assert verdict.agreed
    assert verdict.outcomes[NAME] == "unobserved"


def test_an_engine_without_counts_is_unobserved() -> None:
    for case in (TOGETHER, sampled(TOGETHER)):
        assert verdict_of(counted_batches(is_quiet=True, chains=FIXED), case).outcomes[NAME] == "unobserved"


def test_16_bits_cancelled_requests_and_runs_without_a_draft_are_not_compared() -> None:
    assert TOGETHER.session is not None
    rounded = counted_batches("accepts less", chains=FIXED, dtypes=("bfloat16",))
    assert verdict_of(rounded, replace(TOGETHER, dtype="bfloat16")).outcomes[NAME] == "not_applicable"
    cancelled = (*TOGETHER.session.actions[:3], Action("cancel", (0,)), Action("cancel", (1,)))
    session = replace(TOGETHER, session=replace(TOGETHER.session, actions=cancelled))
    assert verdict_of(counted_batches("bonus counted", chains=FIXED), session).outcomes[NAME] == "not_applicable"
    plain_mates = tuple(replace(mate, draft=Scripted()) for mate in MATES)
    plain = replace(TOGETHER, draft=Scripted(), session=replace(TOGETHER.session, mates=plain_mates))
    assert verdict_of(counted_batches(chains=FIXED), plain).outcomes[NAME] == "not_applicable"


def test_a_difference_of_one_session_may_be_a_tie_of_an_unknown_draft_in_float32() -> None:
    backend = counted_batches("tie on one prompt", own_drafts=True, dtypes=("float32", "float64"))
    verdict = verdict_of(backend, TOGETHER)
    assert verdict.agreed
    assert verdict.outcomes[NAME] == "unobserved"
    assert verdict_of(backend, replace(TOGETHER, dtype="float64")).outcomes[NAME] == "failed"


def test_a_tie_of_the_draft_model_excuses_the_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    def tied(case: Case, oracle: Oracle, subject: Subject, chains: Chains, trace: Trace) -> Rates:
        return Rates(np.zeros(len(trace.output)), np.ones(len(trace.output)))

    monkeypatch.setattr(company, "rates_of", tied)
    verdict = verdict_of(counted_batches("state of another", chains=FIXED), TOGETHER)
    assert verdict.agreed
    assert verdict.outcomes[NAME] == "unobserved"


def test_the_counts_of_cut_chains_are_possible_and_others_are_not() -> None:
    hits = np.array([True, True, False, True, True, True, False, False])
    # Chains of 3: two accepted and a miss, three accepted and a miss, a miss at the end.
    assert is_possible(hits, 3, Speculated(9, 5))
    assert is_possible(hits, 3, Speculated(8, 5)), "the last chain has room for less"
    assert is_possible(hits, 3, Speculated(9, 4)), "the second chain is cut to two, another step drafts one"
    assert not is_possible(hits, 3, Speculated(9, 6)), "five tokens of the text are the draft's"
    assert not is_possible(hits, 3, Speculated(15, 3)), "whole chains in each step, and less is accepted"
    assert not is_possible(hits, 3, Speculated(4, 5)), "fewer are drafted than accepted"
    behind = np.array([False, True, True])
    assert is_possible(behind, 3, Speculated(6, 3)), "tokens behind the end may count"
    assert is_possible(behind, 3, Speculated(6, 1)), "the last token of the text may not"
    for run in possible_runs(hits, 3):
        assert is_possible(hits, 3, Speculated(*run))


def possible_runs(hits: Array, chain: int, place: int = 0, counts: tuple[int, int] = (0, 0)) -> set[tuple[int, int]]:
    """The drafted and accepted tokens of all ways through a text whose end cuts chains."""
    if place >= len(hits):
        return {counts}
    runs = set[tuple[int, int]]()
    for length in range(min(chain, len(hits) - place - 1) + 1):
        misses = np.flatnonzero(~hits[place : place + length])
        accepted = int(misses[0]) if len(misses) else length
        runs |= possible_runs(hits, chain, place + accepted + 1, (counts[0] + length, counts[1] + accepted))
    return runs


def test_the_evidence_of_pairs_has_mean_one_under_every_symmetric_law() -> None:
    sizes = np.array([0.1, 0.5, 0.5, 1.0, 2.0, 3.0, 0.0])
    signs = product((-1, 1), repeat=len(sizes))
    mean = np.mean([np.exp(log_evidence_of_pairs(sizes * np.array(sign))) for sign in signs])
    assert mean == pytest.approx(1.0)


def test_pairs_count_by_place_where_some_accept_nothing() -> None:
    pairs = PairedCounts()
    pairs.add(([0], [0]), (4, 4), (12, 12))
    pairs.add(([3, 2, 1], [1, 1]), (4, 5), (12, 15))
    pairs.add(([0], [4, 2, 1, 1]), (4, 4), (12, 12))
    assert len(pairs) == 3
    assert pairs.accepted == {-1: [3, 5], 0: [2, 3], 1: [1, 1], 2: [0, 1]}
    assert (pairs.tried, pairs.proposed) == ([12, 13], [36, 39])
    assert set(pairs.log_es) == {-1, 0, 1, 2}


def test_our_engine_shows_a_draft_that_is_worse_in_a_batch_that_has_shrunk() -> None:
    """The draft of a launched step runs by the indices of a larger batch: the text is right, less of it is accepted."""
    draft = LanguageModel(LLAMA, RankTree((0, 0, 1, 2), (0, 0, 0, 0)))
    words = (
        "add 0, add 1, launch 0 1, launch 0 1, resolve 0, launch 1 0, resolve 1, resolve 0, launch 0, launch 1, "
        "resolve 0, resolve 1"
    )
    actions = tuple(Action(kind, tuple(map(int, numbers))) for kind, *numbers in map(str.split, words.split(", ")))
    mate = Mate((7, 8, 2), draft, stops=Stops(24))
    case = Case(
        LLAMA, (3, 14, 15, 9, 6), draft, stops=Stops(24), dtype="float64", session=Session((mate,), actions)
    )  # fmt: skip
    backend = open_engine("cpu-captured-drafts")
    right = judge(case, ASKED, ORACLE, subject_of(backend))
    assert right.agreed
    assert right.outcomes[NAME] == "checked"
    faults.plant(backend, faults.fault_named("shrunk-batch-by-old-indices"))
    wrong = judge(case, ASKED, ORACLE, subject_of(backend))
    assert {finding.invariant for finding in wrong.findings} == {NAME}
    assert wrong.findings[0].where["side"] == "less is accepted beside other requests"


def test_the_page_says_what_is_accepted_beside_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    in_this_process(monkeypatch)
    monkeypatch.chdir(tmp_path)
    backend = "tests.strangers.counted_batches:open_another"
    with pytest.raises(SystemExit) as ended:
        main(["diff", "--backend", backend, "--cases", "4", "--seed", "1", "--jobs", "1"])
    page = " ".join(capfd.readouterr().out.split())
    assert ended.value.code == 1
    assert "less is accepted beside other requests" in page, page
    assert NAME in page
