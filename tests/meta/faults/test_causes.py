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


def failure(case: Case, *found: tuple[str, Stage], broke: bool = False) -> Failure:
    """A failure located by the first of `found`."""
    findings = tuple(Finding(name, stage, 0, {}, FINISHED if broke else 1, 2) for name, stage in found)
    verdict = Verdict(case, "x", {name: "failed" for name, _ in found}, findings)
    return Failure(verdict, findings[0], case.id)


def test_two_invariants_that_fail_on_one_case_are_one_cause_and_the_earliest_stage_is_told() -> None:
    late = failure(SMALL, ("a.late", Stage.EMITTED), ("b.early", Stage.LOWERED))
    early = failure(LARGE, ("b.early", Stage.LOWERED))
    (told,) = by_cause([late, early])
    assert told.finding.invariant == "b.early"
    assert told.also == (SameDefect("a.late", Stage.EMITTED, SMALL.id),)
    assert by_cause([early, late]) == [told]


def test_the_same_finding_of_two_workers_is_told_on_the_smaller_case() -> None:
    (told,) = by_cause([failure(LARGE, ("a.b", Stage.SCORED)), failure(SMALL, ("a.b", Stage.SCORED))])
    assert told.verdict.case == SMALL
    assert [one.case for one in told.also] == [LARGE.id]


def test_what_shares_nothing_stays_apart() -> None:
    one, other = failure(SMALL, ("a.b", Stage.SCORED)), failure(LARGE, ("c.d", Stage.SCORED))
    assert by_cause([one, other]) == [one, other]
    assert by_cause([one, failure(LARGE, ("a.b", Stage.EMITTED), broke=True)])[0].finding.invariant == "a.b"
    assert by_cause([]) == []


def test_a_chain_of_shared_findings_is_one_cause() -> None:
    first, last = failure(SMALL, ("a.a", Stage.SCORED)), failure(SMALL, ("c.c", Stage.EMITTED))
    between = failure(LARGE, ("b.b", Stage.ACCEPTED), ("a.a", Stage.SCORED), ("c.c", Stage.EMITTED))
    (told,) = by_cause([first, last, between])
    assert told.finding.invariant == "a.a"
    assert {one.invariant for one in told.also} == {"b.b", "c.c"}


def test_a_run_that_broke_gives_way_to_what_says_where() -> None:
    broke = failure(SMALL, ("a.b", Stage.DRAFTED), ("c.d", Stage.SCORED), broke=True)
    (told,) = by_cause([broke, failure(LARGE, ("c.d", Stage.SCORED))])
    assert told.finding.invariant == "c.d"


def test_page_and_json_tell_the_cause_once_and_the_nearest_case_that_agrees() -> None:
    subject = subject_of(open_planted("cpu-eager", "tree-masked-as-chain"))
    verdicts: list[Verdict] = []
    search = Search(Plan(shrink_s=60.0), ALL, Oracle(), subject, verdicts.append, lambda: False)
    search.run_given([(replace(LARGE, draft=Scripted((Tree((0, 0, 0), (2, 3, 1)),))), ALL)])
    found = search.failure()
    assert found is not None
    assert found.nearest is not None
    # One step of shrinking lies between them: a node less, or a setting.
    assert 0 < distance(found.nearest, found.verdict.case) < distance(LARGE, SMALL) + 4
    oracle = Oracle()
    again = Search(Plan(), ALL, oracle, subject, verdicts.append, lambda: False)
    again.run_given([(found.nearest, tuple(one for one in ALL if one.name == found.finding.invariant))])
    assert not again.differs
    told = replace(found, also=(SameDefect("b.early", Stage.LOWERED, "cafe"),))
    page = " ".join(failure_page(told).split())
    assert "nearest case that agrees: " in page
    assert "also seen by b.early at stage lowered, case cafe: one cause" in page
    fact = json.loads(as_json(failure_fact(told)))
    assert fact["also_seen"] == [{"invariant": "b.early", "stage": "lowered", "case": "cafe", "file": None}]
    assert case_from_json(fact["nearest"]["case"]) == found.nearest
    assert fact["nearest"]["differences"]
