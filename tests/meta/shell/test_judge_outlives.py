"""An exception inside the judge is a row of its own: the case is saved, the run goes on and ends with exit code 3."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from xml.etree import ElementTree

import pytest

from specverify.backends.base import Unavailable
from specverify.backends.compositions import open_cpu
from specverify.cli import main
from specverify.properties.invariants import ALL
from specverify.properties.live.watch import JudgeFailure, SessionStats, Watch
from specverify.properties.tally import Tally
from specverify.properties.verdict import judge as judging
from specverify.properties.verdict import session_members
from specverify.properties.verdict.finding import Comparisons, Finding
from specverify.properties.verdict.internal import JUDGE
from specverify.properties.verdict.invariant import Fact, Invariant, Oracle, needing
from specverify.properties.verdict.judge import judge
from specverify.properties.verdict.routing import Exchanges
from specverify.properties.verdict.subject import Subject
from specverify.pytest_plugin import BackendUnderTest
from specverify.reference.case import Case
from specverify.reference.oracle.decoder import Oracle as Definition
from specverify.reference.sampling import Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.trace import Stage, Trace
from specverify.reports import bundle
from specverify.reports.html.pages import diff_page
from specverify.setup import selection
from specverify.setup.subjects import subject_of
from tests.cases import SHORTEST
from tests.corruption import BY_NAME
from tests.inprocess import in_this_process

GREEDY = BY_NAME["lossless.greedy-match"]


def raising(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    yield Comparisons()
    (lambda steps: steps[97])(subject(case).steps)


BROKEN = Invariant("attention.context-exact", "One that raises.", needing(), raising)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few invariants, of which one raises on every case that it is asked of, in this process."""
    in_this_process(monkeypatch)
    other_invariants = (GREEDY, BY_NAME["lossless.completes"], BY_NAME["acceptance.law-exact"])
    monkeypatch.setattr(selection, "ALL", (BROKEN, *other_invariants))


def command(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return cast(int, ended.value.code), *capfd.readouterr()


def test_an_invariant_that_raises_is_internal_and_the_others_are_asked() -> None:
    verdict = judge(SHORTEST, (BROKEN, GREEDY), Definition(), subject_of(open_cpu()))
    assert verdict.outcomes == {BROKEN.name: "internal", GREEDY.name: "checked"}
    (error,) = verdict.internal
    assert error.invariant == BROKEN.name
    assert error.why.startswith("IndexError: tuple index out of range (test_judge_outlives.py:")
    assert error.said[-1].endswith("(lambda steps: steps[97])(subject(case).steps)")
    assert BROKEN.name not in verdict.compared


def test_a_finding_before_the_exception_stays_a_finding() -> None:
    def differs(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
        yield Finding(BROKEN.name, Stage.SCORED, 0, {}, 1, 2)
        raise KeyError("layer")

    verdict = judge(SHORTEST, (replace(BROKEN, check=differs),), Definition(), subject_of(open_cpu()))
    assert verdict.outcomes == {BROKEN.name: "failed"}
    assert [error.why.split(" (")[0] for error in verdict.internal] == ["KeyError: 'layer'"]
    tally = Tally("cpu")
    tally.add(verdict)
    assert (tally.outcome, tally.exit_code) == ("differ", 1)


def test_an_oracle_that_raises_is_internal_to_those_who_ask_it() -> None:
    def failing(case: Case) -> Trace:
        raise ZeroDivisionError("no such formula")

    verdict = judge(SHORTEST, (GREEDY, BY_NAME["lossless.completes"]), failing, subject_of(open_cpu()))
    assert verdict.outcomes == {GREEDY.name: "internal", "lossless.completes": "checked"}


def test_a_finding_whose_ties_raise_stays_and_the_judge_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> None:
        raise LookupError("no router")

    def differs(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
        yield Finding(BROKEN.name, Stage.SCORED, 0, {}, 1, 2, 3.0)

    monkeypatch.setattr(Exchanges, "explain", unknown)
    verdict = judge(SHORTEST, (replace(BROKEN, check=differs),), Definition(), subject_of(open_cpu()))
    assert verdict.outcomes == {BROKEN.name: "failed"}
    assert [(error.invariant, error.why.split(" (")[0]) for error in verdict.internal] == [
        (JUDGE, "LookupError: no router")
    ]


def test_where_the_judge_raises_no_invariant_has_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> None:
        raise LookupError("no counts")

    monkeypatch.setattr(judging, "_first_run", unknown)
    verdict = judge(SHORTEST, (GREEDY,), Definition(), subject_of(open_cpu()))
    assert verdict.outcomes == {GREEDY.name: "internal"}
    assert [(error.invariant, error.why.split(" (")[0]) for error in verdict.internal] == [
        (JUDGE, "LookupError: no counts")
    ]


def test_a_session_whose_members_cannot_be_told_is_internal(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(*_: object) -> Iterator[session_members.Member]:
        raise IndexError("no account")
        yield

    monkeypatch.setattr(judging, "members", unreadable)
    session = Session((Mate((3,), stops=Stops(1)),), (Action("add", (0,)), Action("step", (0,))))
    verdict = judge(replace(SHORTEST, session=session), ALL, Definition(), subject_of(open_cpu()))
    assert [error.invariant for error in verdict.internal] == [JUDGE]
    assert verdict.outcomes["lossless.completes"] == "checked"


def test_an_engine_that_is_gone_still_ends_the_run() -> None:
    def run_vanished(case: Case) -> Trace:
        raise Unavailable("the server is gone")

    with pytest.raises(Unavailable, match="the server is gone"):
        judge(SHORTEST, ALL, Definition(), Subject("gone", run_vanished, frozenset(Stage)))


def test_a_run_goes_on_and_every_report_names_the_invariant(
    broken: None, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = ["--json", "out.json", "--junit", "out.xml", "--report", "out"]
    code, out, _ = command(capfd, "diff", "--cases", "3", "--seed", "3", "--jobs", "1", *files)
    result = json.loads(Path("out.json").read_text())
    assert (code, result["outcome"], result["cases"], result["judged"]) == (3, "unjudged", 3, 3)
    (row,) = result["internal"]
    assert row["invariant"] == BROKEN.name
    assert row["cases"] == result["invariants"][BROKEN.name]["internal"] == 3
    assert result["invariants"][BROKEN.name]["checked"] == 0
    assert result["invariants"][GREEDY.name]["internal"] == 0
    assert [line for line in result["errors"] if BROKEN.name in line]
    page = " ".join(out.split())
    assert out.startswith("COULD NOT JUDGE")
    assert f"internal error in {BROKEN.name}: IndexError: tuple index out of range" in page
    assert "(lambda steps: steps[97])(subject(case).steps)" in page
    assert row["replay"] in page.replace("\\ ", "")
    suite = ElementTree.parse("out.xml")
    entry = next(testcase for testcase in suite.iter("testcase") if testcase.get("name") == BROKEN.name)
    error = next(element for element in entry if element.tag == "error")
    assert "(lambda steps: steps[97])" in str(error.text)
    lines = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert {line["outcome"] for line in lines} == {"internal"}
    assert {line["invariants"][BROKEN.name] for line in lines} == {"internal"}
    # The saved case runs again, and the judge still has no answer.
    (file,) = (tmp_path / "out").glob(f"*-{BROKEN.name}.json")
    assert bundle.load(file).stage is None
    code, out, _ = command(capfd, "replay", str(file), "--json", "replay.json")
    assert code == 3
    assert "(lambda steps: steps[97])(subject(case).steps)" in " ".join(out.split())
    assert out.splitlines()[-1].startswith(f"UNJUDGED  internal error in {BROKEN.name} again: IndexError")
    assert json.loads(Path("replay.json").read_text())["internal"][0]["invariant"] == BROKEN.name


def test_a_saved_internal_error_is_fixed_once_the_invariant_answers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tally = Tally("cpu-eager")
    tally.add(judge(SHORTEST, (BROKEN,), Definition(), subject_of(open_cpu())))
    file = bundle.save(tmp_path, tally.internal[0].as_failure(), {})
    in_this_process(monkeypatch)
    code, out, _ = command(capfd, "replay", str(file))
    assert (code, out.split()[:3]) == (0, ["FIXED", BROKEN.name, "holds"])


def test_the_fixture_of_pytest_fails_a_test_whose_judge_raised() -> None:
    engine = cast(Any, SimpleNamespace(name="cpu-eager", subject=subject_of(open_cpu()), _oracle=Definition()))
    engine.judge = lambda case, *globs: judge(case, (BROKEN,), engine._oracle, engine.subject)
    with pytest.raises(pytest.fail.Exception, match=r"(?s)attention\.context-exact.*tuple index out of range"):
        BackendUnderTest.check(engine, SHORTEST)


def test_a_live_session_whose_judge_raised_was_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specverify.properties.live.watch.LIVE_INVARIANTS", (BROKEN,))
    played = SessionStats()
    session = Session((Mate((3,), stops=Stops(1)),), ())
    watch = Watch(replace(SHORTEST, session=session), Definition(), subject_of(open_cpu()), played)
    watch.do(Action("add", (0,)))
    watch.do(Action("step", (0,)))
    with pytest.raises(JudgeFailure, match=r"internal error in attention\.context-exact"):
        watch.close()
    assert played.judged == 0


def test_a_page_of_a_run_with_an_internal_error_says_so() -> None:
    tally = Tally("cpu-eager")
    tally.add(judge(SHORTEST, (BROKEN, GREEDY), Definition(), subject_of(open_cpu())))
    page = diff_page(tally, "0").decode()
    assert "internal error in attention.context-exact: IndexError" in page
    assert "internal error in 1 case: no answer there" in page
    assert "(lambda steps: steps[97])" in page
