"""Lines of results.jsonl say which run wrote them, and a failure's line holds the case itself."""

import json
import os
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from specverify import __version__
from specverify.campaign import campaign
from specverify.campaign.recorder import diff
from specverify.plan import Plan
from specverify.properties.strategies.models import GALLERY
from specverify.properties.verdict.finding import Finding, Verdict
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.case_json import case_from_json
from specverify.reference.draft import Scripted
from specverify.reference.trace import Stage
from specverify.reference.tree import Tree
from specverify.reports.record import RESULTS, Lines, RunLines, results_file, run_fact, verdict_line
from specverify.setup.files import make_folder

CASE = Case(Seeded(GALLERY[3], 0), (3, 1, 4), Scripted((Tree((0, 0), (4, 5)),)))
FINDING = Finding("cache.isolation", Stage.ATTENDED, 0, {"slot": 1}, [1.0], [2.0])
AGREES = Verdict(CASE, "x", {"cache.isolation": "checked"})
DIFFERS = replace(AGREES, outcomes={"cache.isolation": "failed"}, findings=(FINDING,))


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_every_line_names_its_run_and_a_failure_its_case(tmp_path: Path) -> None:
    run = run_fact("1.2", 7, "kv-truncated-not-gathered")
    with Lines(tmp_path / "x.jsonl", run) as lines:
        lines.add(AGREES)
        lines.add(DIFFERS)
    agreeing, differing = rows(tmp_path / "x.jsonl")
    for row, verdict in ((agreeing, AGREES), (differing, DIFFERS)):
        assert {name: row[name] for name in run} == run
        assert row.items() >= verdict_line(verdict).items()
        row_time = datetime.fromisoformat(row["time"])
        assert row_time.utcoffset() == timedelta(0)
        assert abs(datetime.now(timezone.utc) - row_time) < timedelta(hours=1)
    assert "case" not in agreeing
    assert case_from_json(differing["case"]) == CASE


def test_two_runs_have_different_ids() -> None:
    first, second = run_fact("1", 0, None), run_fact("1", 0, None)
    assert first["run"] != second["run"]
    assert len(first["run"]) == 12


def test_a_line_is_one_write_to_a_file_open_for_appending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    flags: list[int] = []
    write, opened = os.write, os.open

    def note_write(handle: int, content: bytes) -> int:
        written.append(content)
        return write(handle, content)

    def noted_flags(path: str, how: int, mode: int = 0o777) -> int:
        flags.append(how)
        return opened(path, how, mode)

    monkeypatch.setattr(os, "write", note_write)
    monkeypatch.setattr(os, "open", noted_flags)
    with Lines(tmp_path / "x.jsonl", run_fact("1", 0, None)) as lines:
        lines.add(DIFFERS)
    assert len(written) == 1
    assert written[0].endswith(b"}\n")
    assert all(how & os.O_APPEND for how in flags)


def test_diff_writes_its_seed_version_and_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_listener(self: campaign.Campaign) -> None:
        self.listener.verdict_arrived(AGREES)

    monkeypatch.setattr(campaign.Campaign, "run", run_listener)
    diff(Plan(seed=11, fault="stale-row"), tmp_path)
    (row,) = rows(tmp_path / "results.jsonl")
    assert (row["seed"], row["version"], row["fault"]) == (11, __version__, "stale-row")


def test_every_run_has_a_file_of_its_own_and_a_link_leads_to_the_last(tmp_path: Path) -> None:
    (tmp_path / RESULTS).write_text("earlier\n")
    for seed in (1, 2):
        with RunLines(tmp_path, run_fact("1", seed, None)) as lines:
            assert not lines.path.exists()
            lines.add(AGREES)
            lines.add(DIFFERS)
    assert [row["seed"] for row in rows(tmp_path / RESULTS)] == [2, 2]
    files = sorted((tmp_path / "results").iterdir())
    assert len(files) == 3
    assert (tmp_path / "results" / "earlier.jsonl").read_text() == "earlier\n"
    assert (tmp_path / RESULTS).resolve() in files
    assert not (tmp_path / RESULTS).readlink().is_absolute(), "the folder may be moved"
    with RunLines(tmp_path, run_fact("1", 3, None)):
        pass
    assert len([*(tmp_path / "results").iterdir()]) == 3, "a run without a case leaves no file"


def test_runs_of_one_gate_share_a_file(tmp_path: Path) -> None:
    file = results_file(tmp_path, run_fact("1", 0, None))
    for seed in (1, 2):
        with RunLines(tmp_path, run_fact("1", seed, None), file=file) as lines:
            lines.add(AGREES)
    assert [row["seed"] for row in rows(tmp_path / RESULTS)] == [1, 2]


@pytest.mark.parametrize("inner", ["", "models", "lists/deeper"])
def test_our_own_folder_hides_itself_from_git(inner: str, tmp_path: Path) -> None:
    make_folder(tmp_path / ".specverify" / inner)
    assert (tmp_path / ".specverify" / ".gitignore").read_text() == "*\n"
    (tmp_path / ".specverify" / ".gitignore").write_text("mine\n")
    make_folder(tmp_path / ".specverify" / "again")
    assert (tmp_path / ".specverify" / ".gitignore").read_text() == "mine\n"
    make_folder(tmp_path / "reports")
    assert [*(tmp_path / "reports").iterdir()] == [], "a folder that the user names is the user's"
