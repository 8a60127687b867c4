"""A stranger's engine: one file, a factory, and a declaration that is taken at its word."""

import sys
from pathlib import Path

import pytest

from tests.cases import SCRIPTED

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "strangers"))

from specverify.campaign.replay import replay
from specverify.campaign.search import Search
from specverify.plan import Plan
from specverify.properties.invariants import ALL
from specverify.properties.tally import Failure, Tally
from specverify.properties.verdict.finding import Verdict
from specverify.properties.verdict.subject import Subject
from specverify.reference.case import Case
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.trace import Stage
from specverify.reports import bundle
from specverify.setup.errors import UnusableInput
from specverify.setup.selection import invariants_matching
from specverify.setup.subjects import open_planted, subject_of


def verdict_of(backend: str) -> Verdict:
    from specverify.properties.verdict.judge import judge

    return judge(SCRIPTED, ALL, Oracle(), subject_of(open_planted(f"terse_engine:{backend}", None)))


def test_what_is_not_revealed_is_unobserved_and_the_rest_is_judged() -> None:
    verdict = verdict_of("terse")
    assert verdict.agreed
    assert verdict.outcomes["lossless.greedy-match"] == "checked"
    assert verdict.outcomes["lossless.draft-independent"] == "checked"
    for name in ("structure.mask-is-ancestry", "attention.context-exact", "cache.commit-equivalence", "draft.fidelity"):
        assert verdict.outcomes[name] == "unobserved"


def test_a_wrong_token_is_found_without_any_other_stage() -> None:
    verdict = verdict_of("wrong")
    assert verdict.outcomes["lossless.greedy-match"] == "failed"
    assert verdict.first is not None
    assert verdict.first.stage is Stage.EMITTED


def test_a_crash_is_a_finding_and_shrinks_to_the_shortest_prompt_that_crashes() -> None:
    verdicts: list[Verdict] = []
    subject = subject_of(open_planted("terse_engine:crashing", None))
    plan = Plan(cases=200, dtypes=("float32",), shrink_s=10)
    search = Search(plan, invariants_matching(()), Oracle(), subject, verdicts.append, lambda: False)
    search.run()
    failure = search.failure()
    assert failure is not None
    assert failure.finding.invariant == "lossless.completes"
    assert "slot 3 is out of range" in str(failure.finding.observed)
    assert len(failure.verdict.case.prompt) == 3


def test_a_case_outside_the_declaration_is_declined_and_no_pass() -> None:
    from dataclasses import replace

    from specverify.properties.verdict.judge import judge

    subject = subject_of(open_planted("terse_engine:terse", None))
    verdict = judge(replace(SCRIPTED, dtype="float64"), ALL, Oracle(), subject)
    assert verdict.unsupported == "terse declares no dtype float64"
    tally = Tally("terse")
    tally.add(verdict)
    assert (tally.outcome, tally.exit_code) == ("unjudged", 3)


def test_an_error_of_our_own_is_named_and_never_taken_for_a_failing_case() -> None:
    class Broken(Oracle):
        def __call__(self, case: Case) -> object:  # type: ignore[override]
            raise ZeroDivisionError("ours")

    subject: Subject = subject_of(open_planted("cpu-eager", None))
    tally = Tally("cpu-eager")
    search = Search(Plan(cases=5), invariants_matching(()), Broken(), subject, tally.add, lambda: False)  # type: ignore[arg-type]
    search.run()
    assert (tally.cases, tally.differed, tally.exit_code) == (5, 0, 3)
    assert {error.error.why.split(" (")[0] for error in tally.internal} == {"ZeroDivisionError: ours"}


def test_a_bundle_never_picks_the_code_that_replays_it(tmp_path: Path) -> None:
    verdict = verdict_of("wrong")
    assert verdict.first is not None
    failure = Failure(verdict, verdict.first, SCRIPTED.id, backend="terse_engine:wrong")
    file = str(bundle.save(tmp_path, failure, {}))
    with pytest.raises(UnusableInput, match="name it with --backend"):
        replay(file, backend=None, fault=None)
    assert replay(file, backend="terse_engine:wrong", fault=None).word == "FAILED"
    assert replay(file, backend="terse_engine:terse", fault=None).word == "FIXED"
