"""Processes of a run are killed at random moments: what was judged is kept, no line is broken, no process is left."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
KILLS = int(os.environ.get("SPECVERIFY_KILLS", "6"))
"""Runs for each of the two kinds of victim; SPECVERIFY_KILLS=100 makes it the 200 kills of a night."""

CASES, JOBS = 60, 2
ORPHANS_S = 5.0


def start_run(
    folder: Path, backend: str = "tests.strangers.hostile:clean", jobs: int = JOBS
) -> "subprocess.Popen[bytes]":
    """A run in `folder`, where the backend's module may lie."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}",
        "SPECVERIFY_MARK": str(folder),
    }
    command = [sys.executable, "-m", "specverify", "diff", "--backend", backend]
    command += ["--cases", str(CASES), "--jobs", str(jobs), "--dtype", "float64", "--layout", "branch"]
    command += ["--invariant", "lossless.[cs]*", "--json", "result.json"]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)


def processes(folder: Path) -> dict[int, int]:
    """Process id to parent's id, of every process of the run in `folder`."""
    mark = f"SPECVERIFY_MARK={folder}".encode()
    parents = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "environ").read_bytes().split(b"\0")
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if mark in words and fields[0] != "Z":
            parents[int(entry.name)] = int(fields[1])
    return parents


def lines_of(folder: Path) -> list[str]:
    """The lines of the run's results, the one that is being written included."""
    file = folder / ".specverify" / "results.jsonl"
    return file.read_text().splitlines(keepends=True) if file.exists() else []


def rows(folder: Path) -> list[dict[str, object]]:
    """The run's results, each line of which must be whole."""
    lines = lines_of(folder)
    assert all(line.endswith("\n") for line in lines)
    return [json.loads(line) for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_while_a_slow_engine_is_made_to_fail_smaller_loses_no_finding(name: str, tmp_path: Path) -> None:
    run = start_run(tmp_path, "tests.strangers.hostile:sluggish")
    until = time.monotonic() + 120
    while not any(row["outcome"] == "differ" for row in rows(tmp_path)) and time.monotonic() < until:
        time.sleep(0.1)
    time.sleep(1.0)  # the shrinking is under way
    run.send_signal(getattr(signal, name))
    assert run.wait(60) == 1
    nobody_is_left(tmp_path)
    result = json.loads((tmp_path / "result.json").read_text())
    (finding,) = result["findings"]
    assert finding["invariant"] == "lossless.completes"
    assert (tmp_path / ".specverify" / f"{finding['case']['id']}.json").exists()
    assert result["stopped"] == f"interrupted ({'Ctrl-C' if name == 'SIGINT' else name})"
    assert "DIFFER  hostile" in (tmp_path / "log").read_text()


def assert_once_each(judged_rows: list[dict[str, object]]) -> None:
    """No worker judged a case twice; the plainest case is the first of both workers."""
    assert len(judged_rows) <= CASES
    assert max(Counter(str(row["id"]) for row in judged_rows).values(), default=1) <= JOBS


def wait_for_a_random_moment(rng: random.Random, run: "subprocess.Popen[bytes]", folder: Path) -> None:
    """Wait: one time in four while processes start, else until a random number of cases was told and a bit longer."""
    if rng.random() < 0.25:
        time.sleep(rng.uniform(0.2, 6.0))
        return
    threshold = rng.randrange(CASES)
    while len(lines_of(folder)) <= threshold and run.poll() is None:
        time.sleep(0.05)
    time.sleep(rng.uniform(0.0, 0.5))


def nobody_is_left(folder: Path) -> None:
    until = time.monotonic() + ORPHANS_S
    while (processes_left := processes(folder)) and time.monotonic() < until:
        time.sleep(0.1)
    assert processes_left == {}


def test_a_workers_first_steps_need_no_import_that_takes_seconds() -> None:
    """Until the kernel knows whose death ends a worker, the death of the campaign leaves an orphan."""
    program = "import sys, specverify.campaign.worker_entry; print({'numpy', 'torch', 'hypothesis'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout == "set()\n"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes are told apart by /proc")
@pytest.mark.parametrize("number", range(KILLS))
def test_a_killed_run_keeps_what_it_judged_and_leaves_nobody(number: int, tmp_path: Path) -> None:
    rng = random.Random(number)
    run = start_run(tmp_path)
    wait_for_a_random_moment(rng, run, tmp_path)
    ended = run.poll() is not None
    run.send_signal(rng.choice([signal.SIGKILL, signal.SIGTERM]))
    code = run.wait(60)
    nobody_is_left(tmp_path)
    judged_rows = rows(tmp_path)
    # SIGTERM ends a program that has nothing to tell yet, or has told everything; between the two it waits for reports.
    is_whole = len(judged_rows) == CASES and (tmp_path / "result.json").exists()
    assert ended or code in (-signal.SIGKILL, 3) or (code in (0, -signal.SIGTERM) and (judged_rows == [] or is_whole))
    assert_once_each(judged_rows)
    if code == 3 and (tmp_path / "result.json").exists():
        result = json.loads((tmp_path / "result.json").read_text())
        assert result["cases"] == len(judged_rows)
        # One that came when every case was judged has changed nothing of the run.
        assert result["stopped"] == "interrupted (SIGTERM)" or (result["stopped"] is None and len(judged_rows) == CASES)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes are told apart by /proc")
@pytest.mark.parametrize("number", range(KILLS))
def test_a_killed_worker_is_replaced_and_its_cases_are_judged_once(number: int, tmp_path: Path) -> None:
    rng = random.Random(1000 + number)
    run = start_run(tmp_path)
    wait_for_a_random_moment(rng, run, tmp_path)
    family = processes(tmp_path)
    # Workers, keepers, engines: whoever is not the run itself, which must outlive each of them.
    victims = [pid for pid in family if pid != run.pid]
    killed = rng.choice(victims) if victims else None
    if killed is not None:
        try:
            os.kill(killed, rng.choice([signal.SIGKILL, signal.SIGTERM]))
        except ProcessLookupError:
            killed = None
    code = run.wait(180)
    nobody_is_left(tmp_path)
    judged_rows = rows(tmp_path)
    log = (tmp_path / "log").read_text()
    assert_once_each(judged_rows)
    assert len(judged_rows) == CASES or code in (1, 3), log
    result = json.loads((tmp_path / "result.json").read_text())
    # A killed engine is a finding of the case that it ran, or a complaint between two cases; a killed worker neither.
    assert code == {"agree": 0, "differ": 1, "unjudged": 3}[result["outcome"]]
    assert code != 0 or result["judged"] + sum(result["declined"].values()) == CASES
