"""One defect met twice is one finding, and the nearest case that agrees stands beside the smallest that does not."""

import json
from dataclasses import replace

from specverify.campaign.search import Search
from specverify.plan import Plan
from specverify.properties.invariants import ALL
from specverify.properties.same_cause import by_cause
from specverify.properties.shrinking.cases import distance
from specverify.properties.tally import Failure, SameDefect
from specverify.properties.verdict.finding import FINISHED, Finding, Verdict
from specverify.reference.case import Case
from specverify.reference.case_json import case_from_json
from specverify.reference.draft import Scripted
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Stops
from specverify.reference.trace import Stage
from specverify.reference.tree import Tree
from specverify.reports.pages.terminal import failure_page
from specverify.reports.record import failure_fact
from specverify.reports.writing import as_json
from specverify.setup.subjects import open_planted, subject_of
from tests.models import TINY_LLAMA

SMALL = Case(TINY_LLAMA, (1, 2), Scripted((Tree((0,), (2,)),)), stops=Stops(1))
LARGE = replace(SMALL, draft=Scripted((Tree((0, 0, 1), (2, 3, 1)),)))


def failure(case: Case, *named_stages: tuple[str, Stage], broke: bool = False) -> Failure:
    """A failure located by the first of `named_stages`."""
    findings = tuple(Finding(name, stage, 0, {}, FINISHED if broke else 1, 2) for name, stage in named_stages)
    verdict = Verdict(case, "x", {name: "failed" for name, _ in named_stages}, findings)
    return Failure(verdict, findings[0], case.id)


def test_two_invariants_that_fail_on_one_case_are_one_cause_and_the_earliest_stage_is_told() -> None:
    late = failure(SMALL, ("a.late", Stage.EMITTED), ("b.early", Stage.LOWERED))
    early = failure(LARGE, ("b.early", Stage.LOWERED))
    (cause,) = by_cause([late, early])
    assert cause.finding.invariant == "b.early"
    assert cause.also == (SameDefect("a.late", Stage.EMITTED, SMALL.id),)
    assert by_cause([early, late]) == [cause]


def test_the_same_finding_of_two_workers_is_told_on_the_smaller_case() -> None:
    (cause,) = by_cause([failure(LARGE, ("a.b", Stage.SCORED)), failure(SMALL, ("a.b", Stage.SCORED))])
    assert cause.verdict.case == SMALL
    assert [defect.case for defect in cause.also] == [LARGE.id]


def test_what_shares_nothing_stays_apart() -> None:
    first_failure, second_failure = failure(SMALL, ("a.b", Stage.SCORED)), failure(LARGE, ("c.d", Stage.SCORED))
    assert by_cause([first_failure, second_failure]) == [first_failure, second_failure]
    assert by_cause([first_failure, failure(LARGE, ("a.b", Stage.EMITTED), broke=True)])[0].finding.invariant == "a.b"
    assert by_cause([]) == []


def test_a_chain_of_shared_findings_is_one_cause() -> None:
    first, last = failure(SMALL, ("a.a", Stage.SCORED)), failure(SMALL, ("c.c", Stage.EMITTED))
    between = failure(LARGE, ("b.b", Stage.ACCEPTED), ("a.a", Stage.SCORED), ("c.c", Stage.EMITTED))
    (cause,) = by_cause([first, last, between])
    assert cause.finding.invariant == "a.a"
    assert {defect.invariant for defect in cause.also} == {"b.b", "c.c"}


def test_a_run_that_broke_gives_way_to_what_says_where() -> None:
    broke = failure(SMALL, ("a.b", Stage.DRAFTED), ("c.d", Stage.SCORED), broke=True)
    (cause,) = by_cause([broke, failure(LARGE, ("c.d", Stage.SCORED))])
    assert cause.finding.invariant == "c.d"


def test_page_and_json_tell_the_cause_once_and_the_nearest_case_that_agrees() -> None:
    subject = subject_of(open_planted("cpu-eager", "tree-masked-as-chain"))
    verdicts: list[Verdict] = []
    search = Search(Plan(shrink_s=60.0), ALL, Oracle(), subject, verdicts.append, lambda: False)
    search.run_given([(replace(LARGE, draft=Scripted((Tree((0, 0, 0), (2, 3, 1)),))), ALL)])
    found_failure = search.failure()
    assert found_failure is not None
    assert found_failure.nearest is not None
    # One step of shrinking lies between them: a node less, or a setting.
    assert 0 < distance(found_failure.nearest, found_failure.verdict.case) < distance(LARGE, SMALL) + 4
    oracle = Oracle()
    again = Search(Plan(), ALL, oracle, subject, verdicts.append, lambda: False)
    again.run_given(
        [
            (
                found_failure.nearest,
                tuple(invariant for invariant in ALL if invariant.name == found_failure.finding.invariant),
            )
        ]
    )
    assert not again.differs
    full_failure = replace(found_failure, also=(SameDefect("b.early", Stage.LOWERED, "cafe"),))
    page = " ".join(failure_page(full_failure).split())
    assert "nearest case that agrees: " in page
    assert "also seen by b.early at stage lowered, case cafe: one cause" in page
    fact = json.loads(as_json(failure_fact(full_failure)))
    assert fact["also_seen"] == [{"invariant": "b.early", "stage": "lowered", "case": "cafe", "file": None}]
    assert case_from_json(fact["nearest"]["case"]) == found_failure.nearest
    assert fact["nearest"]["differences"]
