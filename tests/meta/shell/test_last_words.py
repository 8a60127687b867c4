"""What a backend's run said before it broke stands on the page, in the JSON and in the bundle, and decides nothing."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len

from specverify.backends.base import StageFailure
from specverify.backends.engine.backend import EngineBackend
from specverify.backends.engine.composition import SEAMS
from specverify.properties.strategies.models import GALLERY
from specverify.properties.tally import Failure, Tally
from specverify.properties.verdict.finding import FINISHED, Finding, Verdict
from specverify.properties.verdict.judge import judge
from specverify.properties.verdict.subject import Crash
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.sampling import Stops
from specverify.reference.trace import Stage
from specverify.reference.tree import Tree
from specverify.reports.bundle import FINDING_FIELDS, bundle_content, load, save
from specverify.reports.junit import junit
from specverify.reports.layout80 import SAID_LINES, WIDTH
from specverify.reports.pages.terminal import failure_page
from specverify.reports.record import failure_fact, verdict_line
from specverify.setup.subjects import FRAMES, last_frames, subject_of
from tests.corruption import BY_NAME, ORACLE

CASE = Case(Seeded(GALLERY[3], 0), (3, 1, 4), Scripted((Tree((0, 0), (4, 5)),)), stops=Stops(3))
COMPLETES = (BY_NAME["lossless.completes"],)


def too_deep(depth: int) -> int:
    """Raises from `depth` calls down."""
    return [1, 2][7] if not depth else too_deep(depth - 1)


def breaking(*arguments: object) -> object:
    """A walk of the tree that breaks."""
    return too_deep(1)


def broken() -> Failure:
    """Our engine with a walk that raises, judged on one case."""
    backend = EngineBackend("x", "cpu", replace(SEAMS, walk=breaking))  # type: ignore[arg-type]
    verdict = judge(CASE, COMPLETES, ORACLE, subject_of(backend))
    assert verdict.first is not None
    return Failure(verdict, verdict.first, CASE.id)


def saying(*lines: str) -> Failure:
    finding = Finding("lossless.completes", Stage.DRAFTED, 0, {}, FINISHED, "died of SIGSEGV", said=lines)
    return Failure(Verdict(CASE, "x", {"lossless.completes": "failed"}, (finding,)), finding, CASE.id)


def test_a_crash_keeps_the_frames_of_the_error_that_began_it_the_innermost_last() -> None:
    frames = broken().finding.said
    assert 2 < len(frames) <= FRAMES
    assert frames[-1].startswith("shell/test_last_words.py:")
    assert frames[-1].endswith("in too_deep: return [1, 2][7] if not depth else too_deep(depth - 1)")
    assert " in breaking: return too_deep(1)" in frames[-3]
    assert not any(str(Path(__file__).resolve().parents[2]) in line or "opening.py" in line for line in frames)


def test_frames_are_the_innermost_and_few() -> None:
    with pytest.raises(IndexError) as caught:
        too_deep(40)
    assert len(last_frames(caught.value)) == FRAMES
    outer = StageFailure(Stage.SCORED, "no")
    outer.__cause__ = caught.value
    assert last_frames(outer) == last_frames(caught.value)
    assert last_frames(StageFailure(Stage.SCORED, "never raised")) == ()


def test_page_json_and_junit_show_them() -> None:
    failure = broken()
    page = failure_page(failure)
    assert "said" in page
    assert "in breaking: return too_deep(1)" in " ".join(page.split())
    assert failure_fact(failure)["said"] == list(failure.finding.said)
    assert verdict_line(failure.verdict)["findings"][0]["said"] == list(failure.finding.said)
    tally = Tally("x", failures=[failure])
    assert b"in breaking" in junit(tally)


def test_a_finding_that_says_nothing_has_no_such_field() -> None:
    failure = saying()
    assert "said" not in failure_page(failure)
    assert "said" not in failure_fact(failure)
    assert "said" not in bundle_content(failure, {})["environment"]


def test_a_bundle_carries_them_where_readers_of_version_1_accept_them(tmp_path: Path) -> None:
    failure = saying("one.py:3 in run: go()", "bell \a and\x1b[31m red")
    file = save(tmp_path, failure, {"python": "3.12"})
    content = json.loads(file.read_text())
    assert content["environment"]["said"].split("\n") == ["one.py:3 in run: go()", "bell \\x07 and\\x1b[31m red"]
    assert set(content["finding"]) == set(FINDING_FIELDS)
    assert all(isinstance(value, str) for value in content["environment"].values())
    assert load(file).case == CASE


def test_a_page_shows_the_last_lines_cut_and_cleaned() -> None:
    long = tuple(f"line {number}: \x1b[2J{'wide 漢 ' * 40}" for number in range(40))
    page = failure_page(saying(*long))
    shown_lines = [line for line in page.splitlines() if ": \\x1b[2J" in line]
    assert len(shown_lines) == SAID_LINES
    assert "line 39:" in page
    assert "line 24:" not in page
    assert "\x1b" not in page
    assert max(map(cell_len, page.splitlines())) <= WIDTH
    assert sum("wide" in line for line in page.splitlines()) <= 3 * SAID_LINES


def test_what_was_said_decides_nothing() -> None:
    assert Crash(None, "no", ("a",)) == Crash(None, "no", ("b",))
    assert saying("a").finding == saying("b").finding
