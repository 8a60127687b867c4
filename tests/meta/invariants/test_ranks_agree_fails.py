"""The invariant of ranks fails on planted faults and changed records, and on nothing that is not shown."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from specverify.backends import faults
from specverify.properties.invariants import ALL
from specverify.properties.verdict.judge import judge
from specverify.properties.verdict.subject import Subject
from specverify.reference.case import Case
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.parallel import RankRun
from specverify.reference.trace import Stage, Trace
from specverify.reports import bundle
from specverify.reports.vocabulary import account
from specverify.setup.subjects import open_planted, subject_of
from tests.cases import CORPUS
from tests.meta.engine.test_ranks import spread_over

NAME = "lossless.ranks-agree"
INVARIANT = [invariant for invariant in ALL if invariant.name == NAME]
CASE = bundle.load(CORPUS / "rank-greedy-not-broadcast.json").case


def test_a_rank_that_decides_alone_is_found() -> None:
    verdict = judge(CASE, INVARIANT, Oracle(), subject_of(open_planted("cpu-eager", "rank-greedy-not-broadcast")))
    assert verdict.first is not None
    assert verdict.first.stage is faults.fault_named("rank-greedy-not-broadcast").stage
    assert account(verdict.first)
    assert not judge(CASE, INVARIANT, Oracle(), subject_of(open_planted("cpu-eager", None))).findings


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_idle_rank_that_skips_a_collective_is_found(ranks: int) -> None:
    case = spread_over(ranks)
    verdict = judge(case, INVARIANT, Oracle(), subject_of(open_planted("cpu-eager", "rank-idle-skips-step")))
    assert verdict.first is not None
    assert verdict.first.where["side"] == "collectives"
    assert not judge(case, INVARIANT, Oracle(), subject_of(open_planted("cpu-eager", None))).findings


@pytest.mark.parametrize("name", ["rank-draws-once-more", "rank-shard-sized-draws"])
def test_wrong_draws_are_found_by_the_law(name: str) -> None:
    case = bundle.load(CORPUS / f"{name}.json").case
    laws = [invariant for invariant in ALL if invariant.name in ("acceptance.law-exact", "acceptance.law-joint")]
    verdict = judge(case, laws, Oracle(), subject_of(open_planted("cpu-eager", name)))
    assert "acceptance.law-joint" in {finding.invariant for finding in verdict.findings}
    assert not judge(case, laws, Oracle(), subject_of(open_planted("cpu-eager", None))).findings


def subject_with(runs: Callable[[RankRun], tuple[RankRun, ...] | None]) -> Subject:
    """The oracle as a backend of two ranks, whose records are `runs` of the right one."""

    def run(case: Case) -> Trace:
        trace = Oracle()(case)
        steps = [(step.emitted, step.accepted) for step in trace.steps]
        tokens = tuple(emitted.tokens for emitted, _ in steps if emitted is not None)
        lengths = tuple(len(accepted.path) for _, accepted in steps if accepted is not None)
        return replace(trace, ranks=runs(RankRun(tokens, lengths, ("all_reduce sum [1]", "broadcast [1, 2]"))))

    return Subject("changed", run, frozenset(Stage))


@pytest.mark.parametrize(
    ("change", "side", "stage"),
    [
        (lambda run: replace(run, tokens=((9,), *run.tokens[1:])), "tokens", Stage.ACCEPTED),
        (lambda run: replace(run, lengths=(9, *run.lengths[1:])), "lengths", Stage.ACCEPTED),
        (lambda run: replace(run, calls=run.calls[::-1]), "collectives", Stage.ATTENDED),
        (lambda run: replace(run, calls=run.calls[:1]), "collectives", Stage.ATTENDED),
        (lambda run: replace(run, tokens=(), lengths=(), calls=()), "collectives", Stage.ATTENDED),
    ],
)
def test_a_changed_record_fails(change: Callable[[RankRun], RankRun], side: str, stage: Stage) -> None:
    verdict = judge(CASE, INVARIANT, Oracle(), subject_with(lambda run: (run, change(run))))
    assert [(finding.where["side"], finding.where["rank"], finding.stage) for finding in verdict.findings] == [
        (side, 1, stage)
    ]
    assert "rank 1" in account(verdict.findings[0])
    assert not judge(CASE, INVARIANT, Oracle(), subject_with(lambda run: (run, run))).findings


def test_what_is_not_shown_is_not_checked() -> None:
    assert judge(CASE, INVARIANT, Oracle(), subject_with(lambda run: None)).outcomes[NAME] == "unobserved"
    alone = replace(CASE, ranks=1)
    assert judge(alone, INVARIANT, Oracle(), subject_with(lambda run: None)).outcomes[NAME] == "not_applicable"
