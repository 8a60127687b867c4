"""What machines read: JSON lines, the run as JSON, JUnit, files whole or not at all, and the progress on stderr."""

import errno
import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from junitparser import Error, JUnitXml, Skipped
from junitparser import Failure as JUnitFailure

from specverify.properties.tally import Counts, Failure, Tally
from specverify.properties.verdict.finding import Evidence, Finding, Tie, Verdict
from specverify.reference.case_json import case_from_json
from specverify.reference.trace import Accepted, Stage, Step, Trace
from specverify.reports.junit import junit
from specverify.reports.pages.terminal import failure_page
from specverify.reports.progress import Progress, shows_bars
from specverify.reports.record import Lines, summary, verdict_line
from specverify.reports.writing import Unwritable, jsonable, write_json
from tests.cases import ONE_CHILD

ROOT = Path(__file__).resolve().parents[3]
FINDING = Finding(
    "cache.isolation", Stage.COMMITTED, 2, {"layer": 1, "odd": "\x1b[31m\x00\ufffe"}, np.arange(3), float("nan"), np.inf
)
OUTCOMES = {
    "cache.isolation": "failed",
    "lossless.stops": "failed",
    "attention.no-leakage": "unobserved",
    "draft.rollback": "not_applicable",
    "structure.parent-range": "checked",
}
TRACE = Trace((Step((3,), accepted=Accepted((0, 1), 4)), Step((3, 5), accepted=Accepted((0,), 4))), (7, 4), None)
VERDICT = Verdict(
    ONE_CHILD,
    "cpu-eager",
    OUTCOMES,
    (FINDING,),
    (Tie("lossless.stops", 3, 0.5),),
    trace=TRACE,
    seconds=2.0,
    forward_s=1.5,
)
FAILURE = Failure(VERDICT, FINDING, "drawn", file="out/b.json", fault="stale-row", backend="a.b:c", model="m n")


def run(*failures: Failure, **facts: Any) -> Tally:
    tally = Tally("cpu-eager", seconds=3.0, failures=list(failures), **facts)
    for failure in failures:
        tally.add(failure.verdict)
    return tally


def strict(text: str) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_a_verdict_is_one_compact_line() -> None:
    assert verdict_line(VERDICT) == {
        "id": ONE_CHILD.id,
        "backend": "cpu-eager",
        "outcome": "differ",
        "invariants": {"cache.isolation": "failed", "lossless.stops": "failed", "attention.no-leakage": "unobserved"},
        "findings": [
            {
                "invariant": "cache.isolation",
                "stage": "committed",
                "where": {"step": 2, "layer": 1, "odd": "\x1b[31m\x00\ufffe"},
                "expected": [0, 1, 2],
                "observed": "NaN",
                "measure": "Infinity",
            }
        ],
        "ties": [{"invariant": "lossless.stops", "position": 3, "gap_sigma": 0.5}],
        "evidence": [],
        "unsupported": None,
        "seconds": 1.5,
        "judged_seconds": 2.0,
    }
    test = Evidence("lossless.distribution", float("inf"), 7, stream="lossless.distribution at temperature 1")
    assert verdict_line(replace(VERDICT, evidence=(test,)))["evidence"] == [
        {"invariant": test.invariant, "log_e": "Infinity", "draws": 7, "stream": test.stream}
    ]


@pytest.mark.parametrize(
    ("outcomes", "unsupported", "outcome"),
    [
        ({"a.b": "checked", "c.d": "unobserved"}, None, "agree"),
        ({"a.b": "unobserved"}, None, "unjudged"),
        ({"a.b": "not_applicable"}, None, "unjudged"),
        ({}, None, "unjudged"),
        ({"a.b": "not_applicable"}, "takes no tape", "unsupported"),
    ],
)
def test_what_was_not_judged_is_not_written_as_agreement(
    outcomes: dict[str, str], unsupported: str | None, outcome: str
) -> None:
    line = verdict_line(Verdict(ONE_CHILD, "cpu-eager", outcomes, unsupported=unsupported))
    assert line["outcome"] == outcome


def test_lines_are_in_the_file_as_they_arrive_and_survive_a_cut(tmp_path: Path) -> None:
    file = tmp_path / "verdicts.jsonl"
    file.write_text('{"id": "cut o')
    with Lines(file) as lines:
        for count in (1, 2):
            lines.add(VERDICT)
            written = file.read_text().split("\n")
            assert [strict(line) for line in written[1:-1]] == [verdict_line(VERDICT)] * count
            assert written[-1] == ""
    with Lines(file) as lines:
        lines.add(VERDICT)
    assert file.read_text().count("\n") == 4
    with pytest.raises(Unwritable, match=r"cannot write .*: Is a directory; give the name of a file"), Lines(tmp_path):
        pass
    with pytest.raises(Unwritable, match="create the folder first"), Lines(tmp_path / "no" / "x.jsonl"):
        pass


def test_the_summary_holds_the_run_as_strict_json() -> None:
    tally = run(FAILURE, environment={"python": "3.11"}, stopped="time budget", errors=["worker died"])
    tally.accept_lengths = {1: 1, 0: 1}
    content = strict(json.dumps(summary(tally), allow_nan=False))
    assert content["outcome"] == "differ"
    assert content["backend"] == "cpu-eager"
    assert content["cases"] == 1
    assert content["seconds"] == 3.0
    assert content["backend_seconds"] == 1.5
    assert content["invariants"]["cache.isolation"] == {
        "checked": 1,
        "failed": 1,
        "unobserved": 0,
        "not_applicable": 0,
        "compared": 0,
        "internal": 0,
    }
    (finding,) = content["findings"]
    assert finding["stage"] == "committed"
    assert finding["where"]["step"] == 2
    assert finding["observed"] == "NaN"
    assert case_from_json(finding["case"]) == ONE_CHILD
    assert finding["replay"] == "specverify replay out/b.json --backend a.b:c --fault stale-row"
    assert content["ties"] == [{"invariant": "lossless.stops", "position": 3, "gap_sigma": 0.5}]
    assert content["environment"] == {"python": "3.11"}
    assert content["accept_lengths"] == {"0": 1, "1": 1}
    assert content["mean_accepted"] == 0.5
    assert content["stopped"] == "time budget"
    assert content["errors"] == ["worker died"]
    unsaved = summary(run(replace(FAILURE, file=None)))
    assert unsaved["findings"][0]["replay"] is None
    assert summary(run())["mean_accepted"] is None


def test_any_fact_becomes_json() -> None:
    odd = {
        "array": np.array([[1, 2]], np.int8),
        "number": np.float32(0.5),
        "large": np.zeros((100, 100)),
        "stage": Stage.SCORED,
        "text": "\ud800",
        "set": {3, 1},
        "object": object,
        4: (-np.inf, None, np.bool_(True)),
    }
    content = strict(json.dumps(jsonable(odd), allow_nan=False))
    assert content.pop("object").startswith("<class")
    assert content == {
        "array": [[1, 2]],
        "number": 0.5,
        "large": "float64 array of 100 × 100",
        "stage": "scored",
        "text": "\\ud800",
        "set": [1, 3],
        "4": ["-Infinity", None, True],
    }


def test_json_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "summary.json"
    write_json(file, {"a": 1})
    link = tmp_path / "link.json"
    link.symlink_to(file)
    write_json(link, {"a": float("nan")})
    assert link.is_symlink()
    assert strict(file.read_text()) == {"a": "NaN"}
    write_json("-", {"b": 2})
    assert strict(capsys.readouterr().out) == {"b": 2}
    # A pipe of our own stands for every target that must not be replaced, /dev/null among them.
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    write_json(pipe, {"a": 1})
    assert pipe.is_fifo()
    assert strict(os.read(reader, 100).decode()) == {"a": 1}
    os.close(reader)
    pipe.unlink()
    for target, advice in ((tmp_path, "name of a file"), (tmp_path / "no" / "x", "create the folder"), ("a\0", "name")):
        with pytest.raises(Unwritable) as caught:
            write_json(target, {})
        assert advice in caught.value.why
        assert str(caught.value).isprintable()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(Unwritable, match="No space left on device"):
        write_json(file, {"c": 3})
    assert strict(file.read_text()) == {"a": "NaN"}
    assert sorted(tmp_path.iterdir()) == [link, file]


KILLED_WHILE_IT_WRITES = """
import os, signal, sys
from specverify.reports.writing import write_whole
os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
write_whole(sys.argv[1], b"new")
"""


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="files without a name are Linux's")
def test_a_writer_that_is_killed_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text("old")
    run = subprocess.run([sys.executable, "-c", KILLED_WHILE_IT_WRITES, str(file)], cwd=ROOT, check=False)
    assert run.returncode == -signal.SIGKILL
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("link", [errno.EXDEV, errno.EOPNOTSUPP])
def test_where_a_file_without_a_name_cannot_be_had_a_named_one_serves(
    link: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_link(*_: Any, **__: Any) -> None:
        raise OSError(link, "not here")

    monkeypatch.setattr("os.link", refuse_link)
    write_json(tmp_path / "summary.json", {"a": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def results(tally: Tally) -> dict[str, Any]:
    document = JUnitXml.fromstring(junit(tally))
    (suite,) = document
    assert suite.name == "cpu-eager"
    assert suite.tests == len(list(suite))
    return {entry.name: entry for entry in suite}


def test_junit_holds_the_page_and_skips_what_did_not_run() -> None:
    tally = run(FAILURE)
    tally.invariants["attention.padding-inert"] = Counts(checked=2, unobserved=3)
    tally.invariants["acme.fits"] = Counts()
    entries = results(tally)
    (junit_failure,) = entries["cache.isolation"].result
    assert isinstance(junit_failure, JUnitFailure)
    assert junit_failure.text.strip() == failure_page(FAILURE).strip()
    assert "layer 1" in junit_failure.message
    (elsewhere,) = entries["lossless.stops"].result
    assert isinstance(elsewhere, JUnitFailure)
    assert "failed in 1 of 1 case" in elsewhere.message
    reasons = {name: entry.result[0].message for name, entry in entries.items() if any(map(_is_skipped, entry.result))}
    assert reasons == {
        "attention.no-leakage": "not judged: attention.no-leakage (unobserved in 1 case)",
        "draft.rollback": "not judged: draft.rollback (not applicable to 1 case)",
        "acme.fits": "not judged: acme.fits (never reached)",
    }
    assert entries["structure.parent-range"].is_passed
    assert entries["attention.padding-inert"].is_passed
    assert "unobserved in 3 of 5 cases" in entries["attention.padding-inert"].system_out
    assert "run" not in entries


def _is_skipped(result: object) -> bool:
    return isinstance(result, Skipped)


@pytest.mark.parametrize("facts", [{}, {"errors": ["worker \x1b died", "again"]}, {"stopped": "interrupted"}])
def test_junit_is_never_green_when_nothing_was_judged(facts: dict[str, Any]) -> None:
    entries = results(run(**facts))
    run_results = entries["run"].result
    assert run_results
    assert all(isinstance(result, Error) for result in run_results)
    expected = [line.replace("\x1b", "\\x1b") for line in facts.get("errors", [])]
    assert [result.message for result in run_results] == (expected or [facts.get("stopped", "nothing was judged")])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_line_now_and_then_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    sheet = io.StringIO()
    with Progress(100, sheet, clock=lambda: now[0]) as progress:
        for second in range(1, 76):
            now[0] = second
            progress.advance(1, failures=second == 40)
            if second == 50:
                progress.note("shrinking\x1b[31m case")
    assert sheet.getvalue().splitlines() == [
        "30 of 100 cases, 1/s, 1:10 left, no failure",
        "60 of 100 cases, 1/s, 0:40 left, 1 failure, shrinking\\x1b[31m case",
    ]
    short = io.StringIO()
    with Progress(None, short) as quick:
        quick.advance(3)
        quick.note("x")
    assert short.getvalue() == ""
    assert capsys.readouterr().out == ""


def test_the_time_left_leaves_out_the_start() -> None:
    now, sheet = [0.0], io.StringIO()
    with Progress(500, sheet, clock=lambda: now[0]) as progress:
        now[0] = 20.0
        progress.wait()
        assert sheet.getvalue() == ""
        now[0] = 40.0
        progress.wait()
        assert sheet.getvalue() == "0 of 500 cases, starting up for 40 s, no failure\n"
        now[0] = 60.0
        progress.advance()
        now[0] = 60.5
        progress.advance()
        assert progress.line() == "2 of 500 cases, no failure"
        for second in (61.0, 61.5, 62.0):
            now[0] = second
            progress.advance()
        assert progress.line() == "5 of 500 cases, 2/s, 4:08 left, no failure"


def test_the_speed_leaves_out_what_an_earlier_run_did() -> None:
    now = [0.0]
    with Progress(500, io.StringIO(), clock=lambda: now[0]) as progress:
        progress.advance(300)
        progress.restart()
        now[0] = 10.0
        assert progress.line() == "300 of 500 cases, starting up for 10 s, no failure"
        for _ in range(4):
            now[0] += 1.0
            progress.advance()
        assert progress.line() == "304 of 500 cases, 1/s, 3:16 left, no failure"


def test_progress_is_a_bar_on_a_terminal_and_leaves_stdout_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "140")
    sheet = Terminal()
    with Progress(10, sheet) as progress:
        progress.advance(4, failures=2)
        progress.note("shrinking [bold]case")
        print("kept")  # noqa: T201 - what the run itself writes must pass untouched
    assert "4/10" in sheet.getvalue()
    assert "2 failures" in sheet.getvalue()
    assert "[bold]case" in sheet.getvalue()
    assert "kept" not in sheet.getvalue()
    assert capsys.readouterr().out == "kept\n"
    monkeypatch.setenv("CI", "true")
    assert not shows_bars(sheet)
    monkeypatch.setenv("CI", "false")
    monkeypatch.setenv("TERM", "dumb")
    assert not shows_bars(sheet)
