"""How a self-test hunts: cases as a search draws them, none judged twice for nothing, no worker idle, strangers too."""

import sys
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "strangers"))

from specverify.campaign import search as searching
from specverify.campaign.case_stream import Stream
from specverify.campaign.search import Search
from specverify.cli import main
from specverify.plan import Plan, default_dtypes
from specverify.properties.invariants import ALL
from specverify.properties.shrinking.cases import STEPS, attempts
from specverify.properties.shrinking.sessions import prunings, without_subtrees
from specverify.properties.verdict.finding import Verdict
from specverify.properties.verdict.judge import judge
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.trace import Stage
from specverify.reference.tree import Tree
from specverify.reports.pages.selftest import FaultHunt, SelfTest
from specverify.selftest.clean_runs import ON_TABLES, TABLES_ALONE, CleanRuns
from specverify.selftest.hunt import HuntPlan, HuntResult, asks_tables, hunt, nodes_of
from specverify.selftest.schedule import CLEAN_EVERY, ROUNDS, Course, _note
from specverify.setup.subjects import open_planted, subject_of
from tests.models import LLAMA

CHAIN = Case(LLAMA, (3, 1, 4), Scripted((Tree((0, 0, 1), (4, 2, 5)),)), stops=Stops(2))
BRANCHED = Case(LLAMA, (3, 1, 4), Scripted((Tree((0, 0, 0), (4, 2, 5)),)), stops=Stops(2))
SAMPLED = Case(CHAIN.model, CHAIN.prompt, CHAIN.draft, sampling=Sampling(1.0), stops=Stops(2))


def test_a_stream_is_what_a_search_judges(monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[Case] = []

    def note_case(case: Case, *_: object) -> Verdict:
        judged.append(case)
        return Verdict(case, "x", {})

    monkeypatch.setattr(searching, "judge", note_case)
    subject = subject_of(open_planted("cpu-eager", None))
    Search(Plan(cases=15, seed=3), ALL, None, subject, lambda verdict: None, lambda: False).run()  # type: ignore[arg-type]
    assert len(judged) == 15
    assert judged == list(islice(Stream(3, ("float32", "float64")), 15))


def test_a_hunt_judges_the_cases_of_a_diff_of_one_worker_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_seed = 3
    judged: list[str] = []

    def note_case(case: Case, *_: object) -> Verdict:
        judged.append(case.id)
        return Verdict(case, "x", {})

    monkeypatch.setattr(searching, "judge", note_case)
    plan = replace(Plan(cases=12, seed=asked_seed).slice(0), dtypes=default_dtypes("cpu-eager"))
    subject = subject_of(open_planted("cpu-eager", None))
    Search(plan, ALL, None, subject, lambda verdict: None, lambda: False).run()  # type: ignore[arg-type]
    drawn, judged[:] = list(judged), []
    assert len(set(drawn)) == 12
    course = Course(["tree-masked-as-chain"], {"tree-masked-as-chain": "cpu-eager"}, asked_seed, time.time() + 60)
    first = next(task for task in course.first() if task.fault)
    for part in (replace(first, cases=4), replace(first, cases=8, skip=4)):
        result = hunt(replace(part, sieved=False))
        assert (result.skip, result.cases) == (part.skip, part.cases)
    assert judged == drawn


def test_a_fault_counts_the_cases_up_to_the_one_that_met_it() -> None:
    report = SelfTest([FaultHunt("f", "BZ-001", "lowered", {})])
    _note(report, HuntResult("f", "cpu-eager", cases=60))
    _note(report, HuntResult("f", "cpu-eager", cases=60, skip=210))
    assert report.faults[0].cases == 270
    _note(report, HuntResult("f", "cpu-eager", cases=7, skip=60, caught=True, by="x", stage="lowered"))
    assert report.faults[0].cases == 67, "the round that met it ran beside a later one"


def test_a_case_on_which_nothing_is_done_otherwise_is_left_to_the_tables() -> None:
    clean_runs = CleanRuns("cpu-eager")
    planted = subject_of(open_planted("cpu-eager", "tree-masked-as-chain"))
    for tables in (True, False):
        assert clean_runs.worth_judging(BRANCHED, planted, ALL, tables) == ALL
    invariants = clean_runs.worth_judging(CHAIN, planted, ALL, tables=True)
    assert {invariant.name for invariant in invariants} == ON_TABLES
    assert {invariant.name for invariant in ALL} > ON_TABLES
    assert clean_runs.worth_judging(CHAIN, planted, ALL, tables=False) == ()
    clean = subject_of(open_planted("cpu-eager", None))
    for case in (CHAIN, BRANCHED, SAMPLED):
        assert {invariant.name for invariant in clean_runs.worth_judging(case, clean, ALL, tables=True)} == ON_TABLES


def test_tables_are_asked_of_those_alone_whose_sampling_was_touched() -> None:
    clean_runs = CleanRuns("cpu-eager")
    moved, law = (open_planted("cpu-eager", name) for name in ("page-known-by-own-tokens", "coin-at-threshold-accepts"))
    assert clean_runs.samples_like(moved)
    assert not clean_runs.samples_like(law)
    assert not clean_runs.samples_like(open_planted("terse_engine:terse", None))
    sampled = HuntPlan("coin-at-threshold-accepts", "cpu-eager", 0, 1, ("float32",), 1.0, 0.0, True)
    assert asks_tables(sampled, law)
    assert asks_tables(replace(sampled, fault=None), open_planted("cpu-eager", None)), "a clean hunt asks all"
    assert not asks_tables(replace(sampled, fault="page-known-by-own-tokens"), moved)
    # Whole generations are asked beside the tables (`lossless.distribution`), so that one stays.
    assert ON_TABLES - {"lossless.distribution"} == TABLES_ALONE


def test_a_variant_that_differs_by_itself_is_located_as_a_case_of_its_own() -> None:
    subject = subject_of(open_planted("cpu-eager", "tree-masked-as-chain"))
    oracle = Oracle()
    looking = tuple(invariant for invariant in ALL if invariant.looks_at_run)
    assert judge(CHAIN, looking, oracle, subject).agreed  # in the order of a chain, a mask of chains is right
    search = Search(Plan(shrink_s=0.0), ALL, oracle, subject, lambda verdict: None, lambda: False)
    search.run_given(
        [(CHAIN, tuple(invariant for invariant in ALL if invariant.name == "attention.order-equivariant"))]
    )
    failure = search.failure(search_nearest=False)
    assert failure is not None
    assert failure.finding.stage is Stage.LOWERED
    assert failure.verdict.case != CHAIN
    assert nodes_of(failure.verdict.case) == 3
    assert not judge(failure.verdict.case, looking, oracle, subject).agreed


def test_a_crash_is_no_clean_run() -> None:
    clean_runs = CleanRuns("cpu-eager")
    broken = subject_of(open_planted("terse_engine:crashing", None))
    assert clean_runs.worth_judging(CHAIN, broken, ALL, tables=False) == ALL


def test_a_fault_at_large_is_hunted_again_for_longer_and_clean_hunts_come_between() -> None:
    names = [f"f{number}" for number in range(CLEAN_EVERY + 1)]
    course = Course(names, dict.fromkeys(names, "cpu-eager"), 5, time.time() + 60)
    first = course.first()
    assert [task.fault for task in first if task.fault] == names
    assert sum(task.fault is None for task in first) == 2
    rounds = [first[0]]
    while after := course.after(HuntResult("f0", "cpu-eager", cases=rounds[-1].cases)):
        rounds += [task for task in after if task.fault]
    assert [(task.cases, task.sieved) for task in rounds] == list(ROUNDS)
    assert {task.seed for task in rounds} == {Plan(seed=5).slice(0).seed}
    ends = [task.skip + task.cases for task in rounds]
    assert [task.skip for task in rounds] == [0, *ends[:-1]], "each round goes on where the one before ended"
    assert course.after(HuntResult("f1", "cpu-eager", caught=True)) == []
    assert course.after(HuntResult("f2", "cpu-eager", missing="no such device")) == []
    late = Course(names, dict.fromkeys(names, "cpu-eager"), 5, time.time() - 1)
    assert late.after(HuntResult("f0", "cpu-eager", cases=60)) == []


def test_large_trees_lose_many_nodes_at_once_and_every_step_is_smaller() -> None:
    tree = Tree((0, *(number // 3 for number in range(39))), (0,) * 40)
    sizes = [len(without_subtrees(tree, *pruning)) for pruning in prunings(tree)]
    assert sizes[0] <= 21
    assert max(sizes) == 39
    assert min(sizes) >= 1
    wide = Case(CHAIN.model, CHAIN.prompt, Scripted((Tree(tree.parent, (4, *(2,) * 39)),)), stops=Stops(2))
    assert all(case != wide for steps in STEPS for case in attempts(steps, wide))


@pytest.mark.slow
def test_a_strangers_backend_with_seams_is_hunted() -> None:
    task = HuntPlan(
        "tree-masked-as-chain", "seamed_engine:seamed", 0, 12, ("float32", "float64"), 1.0, time.time() + 60
    )
    result = hunt(task)
    assert result.caught
    assert result.stage == "lowered"


def test_a_fault_that_does_not_fit_a_backend_is_not_run_there() -> None:
    result = hunt(HuntPlan("ascend-mask-inverted", "seamed_engine:seamed", 0, 4, ("float32",), 1.0, time.time() + 60))
    assert result.missing is not None
    assert "plant it in" in result.missing
    assert result.cases == 0


def test_a_backend_without_seams_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["selftest", "--backend", "terse_engine:terse", "--report", str(tmp_path)])
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", "specverify: backend terse exposes no engine seams: no fault can be planted in it\n")
