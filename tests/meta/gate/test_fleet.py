"""A gate on a cluster: slices, deaths of tasks and drivers, and what a rerun finds again."""

import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specverify.campaign import worker
from specverify.fleet import cluster, ray_crew
from specverify.fleet.cluster import FALLS
from specverify.fleet.facts import to_json
from specverify.fleet.journal import GATE, killed_journal, read
from tests.inprocess import Silent
from tests.meta.gate.conftest import Sample

ROOT = Path(__file__).resolve().parents[3]
WORDS = ("gate", "--cases", "12", "--seed", "4")


class Lost(Exception):
    """Stands for the errors of Ray."""


class TaskError(Lost):
    """Stands for the error of a task itself."""


class Tasks:
    """A stand-in for the module `ray`: tasks run in this process, and die after as many messages as `lives` says."""

    exceptions = SimpleNamespace(RayError=Lost, RayTaskError=TaskError)

    def __init__(self, lives: Callable[[], int]) -> None:
        self.lives, self.started = lives, 0

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 3.0}

    def shutdown(self) -> None:
        print("a word of Ray")  # noqa: T201

    def remote(self, **options: Any) -> Callable[[Any], Any]:
        assert options["max_retries"] == 0
        return lambda function: SimpleNamespace(remote=lambda *words: self._stream(function, *words))

    def _stream(self, function: Any, *words: Any) -> Iterator[Any]:
        self.started += 1
        messages_left = self.lives()
        if not messages_left:
            yield TaskError("Traceback of the task:\n  ...\nModuleNotFoundError: No module named 'mine'")
            return
        for index, message in enumerate(function(*words)):
            if index == messages_left:
                yield Lost("node")
                return
            yield message

    def wait(self, streams: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        return streams[:num_returns], streams[num_returns:]

    def get(self, message: Any) -> Any:
        if isinstance(message, Lost):
            raise message
        return message

    def cancel(self, stream: Any, force: bool) -> None: ...


def messages_of_slice(plan: Any, seconds: float, judged: tuple[str, ...]) -> list[object]:
    """What the worker of a slice tells: always the same of the same slice, so that it is asked once."""
    key = (
        os.environ.get("SMALL_ENGINE", ""),
        plan.agenda.part,
        plan.agenda.parts,
        plan.agenda.seeds,
        plan.cases,
        *sorted(judged),
    )
    if key not in MESSAGES:
        MESSAGES[key] = []
        worker.work(plan.slice(0), MESSAGES[key].append, Silent(), judged)  # type: ignore[arg-type]
    return MESSAGES[key]


MESSAGES: dict[tuple[object, ...], list[object]] = {}


@pytest.fixture
def fleet(sample: Sample, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tasks]:
    """The sample repository without floors and memory; the result sets how long tasks live, for ever by default."""
    file = sample.folder / "pyproject.toml"
    profile = file.read_text().replace('memory = ".specverify/memory"\n', "").replace("judged = 0.9", "")
    file.write_text(profile)
    monkeypatch.setattr(ray_crew, "slice_messages", messages_of_slice)

    def set_up(lives: Callable[[], int] = lambda: 10**9) -> Tasks:
        tasks = Tasks(lives)
        monkeypatch.setattr(cluster, "connect", lambda address, folder: tasks)
        return tasks

    return set_up


def verdicts(folder: Path, run: str = "small_engine:open_") -> Counter[str]:
    """The verdicts of a journal, without times; measures to nine digits, since the last bits follow the machine."""
    facts = (to_json(verdict) for verdict in read(folder).runs[run].verdicts)
    lines = (
        json.dumps({key: value for key, value in fact.items() if key not in ("seconds", "forward_s")}) for fact in facts
    )
    return Counter(json.dumps(json.loads(line, parse_float=lambda digits: f"{float(digits):.9g}")) for line in lines)


def counts(folder: Path) -> Any:
    """What a result says of the cases: counts, digest and outcome."""
    result = json.loads((folder / "gate.json").read_text())
    (run,) = result["runs"]
    parts = ("cases", "wanted", "judged", "invariants", "drawn", "errors", "below_floors", "passed_over")
    return result["exit_code"], {key: run[key] for key in parts}, set(run["signatures"])


@pytest.mark.parametrize("fault", ["", pytest.param("unverified", marks=pytest.mark.slow)])
def test_a_fleet_judges_the_cases_of_one_machine_whatever_dies(
    sample: Sample, fleet: Callable[..., Tasks], fault: str
) -> None:
    sample.plant(fault)
    code = 1 if fault else 0
    assert sample(*WORDS, "--report", "alone") == code
    tasks = fleet()
    assert sample(*WORDS, "--ray", "here", "--report", "whole") == code
    assert tasks.started == 2
    assert "a word of Ray" in sample.err
    assert "a word of Ray" not in sample.out
    deaths = iter([7, 1, 3])
    tasks = fleet(lambda: next(deaths, 10**9))
    assert sample(*WORDS, "--ray", "here", "--shards", "2", "--report", "dying") == code
    assert tasks.started == 2 + 3
    alone = sample.folder / "alone"
    for name in ("whole", "dying"):
        assert verdicts(sample.folder / name) == verdicts(alone)
        assert counts(sample.folder / name) == counts(alone)


def test_a_killed_driver_loses_no_verdict_and_its_rerun_goes_on(sample: Sample, fleet: Callable[..., Tasks]) -> None:
    fleet()
    assert sample(*WORDS, "--ray", "here", "--report", "whole") == 0
    whole_folder, cut = sample.folder / "whole", sample.folder / "cut"
    lines = (whole_folder / "journal.jsonl").read_text().splitlines(keepends=True)
    cut.mkdir()
    (cut / "journal.jsonl").write_text("".join(lines[:9]) + lines[9][:40])
    num_kept = len(read(cut).runs["small_engine:open_"].verdicts)
    assert 3 < num_kept < 12
    assert sample("gate", "--cases", "12", "--ray", "here", "--report", "cut") == 0
    assert f"went on behind {num_kept} cases of a gate that was killed" in " ".join(sample.out.split())
    assert verdicts(cut) == verdicts(whole_folder)
    assert counts(cut) == counts(whole_folder)
    assert killed_journal(cut) is None
    assert read(cut).runs[GATE].ended is not None
    # A gate that ended is not gone on with, nor is one of another profile.
    assert sample(*WORDS, "--ray", "here", "--report", "cut") == 0
    assert "went on" not in sample.out
    (cut / "journal.jsonl").write_text("".join(lines[:9]))
    assert sample("gate", "--cases", "6", "--seed", "4", "--ray", "here", "--report", "cut") == 0
    assert "went on" not in sample.out


def test_a_case_at_which_tasks_keep_dying_is_given_up(sample: Sample, fleet: Callable[..., Tasks]) -> None:
    """The task dies right behind the announcement of its fourth case, whoever judges it."""
    deaths = iter([8, *[2] * (FALLS - 1)])
    fleet(lambda: next(deaths, 10**9))
    assert sample(*WORDS, "--ray", "here", "--shards", "1") == 3
    assert f"was given up: {FALLS} tasks died at it" in " ".join(sample.out.split())
    assert sample.result()["runs"][0]["judged"] == 11


def test_a_fleet_that_never_starts_is_no_pass(sample: Sample, fleet: Callable[..., Tasks]) -> None:
    tasks = fleet(lambda: 0)
    assert sample(*WORDS, "--ray", "here", "--shards", "2") == 3
    assert tasks.started == 2 * FALLS
    output = " ".join(sample.out.split())
    assert "died 3 times before a case (TaskError: ModuleNotFoundError: No module named 'mine')" in output


def test_what_contradicts_ray_is_refused(sample: Sample) -> None:
    assert sample("gate", "--ray", "here", "--shard", "1/2") == 2
    assert sample("gate", "--shards", "2") == 2
    try:
        import ray  # noqa: F401
    except ImportError:
        assert sample("gate", "--ray", "auto") == 3
        assert "[fleet]" in sample.err


PROFILE = """\
backends = ["cpu-eager"]
cases = {cases}
seeds = [0]
fresh-seed = false
dtypes = ["float32"]
jobs = 2
invariants = ["lossless.*", "structure.*"]
"""


class LocalCluster:
    """A Ray cluster of two nodes on this machine, with a token of its own, which ends with the block."""

    def __init__(self, folder: Path, port: int = 6397) -> None:
        self._log, self._port, self.address = folder / "ray.log", port, f"127.0.0.1:{port}"
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.variables = {**os.environ, **token, "PYTHONPATH": str(ROOT), "CI": "true"}

    def _started(self, *words: str) -> "subprocess.Popen[bytes]":
        program = [
            str(Path(sys.executable).parent / "ray"),
            "start",
            "--block",
            "--num-cpus=1",
            "--disable-usage-stats",
        ]
        self._log.write_text("")
        with self._log.open("a") as log:
            node = subprocess.Popen([*program, *words], env=self.variables, stdout=log, stderr=log)
        until = time.monotonic() + 60
        while "Ray runtime started" not in self._log.read_text():
            assert time.monotonic() < until, self._log.read_text()
            time.sleep(0.5)
        return node

    def __enter__(self) -> "LocalCluster":
        self._head = self._started("--head", f"--port={self._port}", "--include-dashboard=false")
        self._node = self._started(f"--address={self.address}")
        return self

    def __exit__(self, *_: object) -> None:
        # The head forgets its address when it is asked to end, so that no later `ray.init()` looks for it.
        pids = descendants(self._head.pid)
        self._head.terminate()
        end(self._node)
        try:
            self._head.wait(30)
        except subprocess.TimeoutExpired:
            end(self._head)
        for pid in pids:
            kill(pid)

    def lose_node(self) -> None:
        """Kill the second node with all that runs on it, and start another."""
        end(self._node)
        self._node = self._started(f"--address={self.address}")

    def workers(self) -> list[int]:
        """The processes of running tasks."""
        below = [*descendants(self._head.pid), *descendants(self._node.pid)]
        return [pid for pid in below if b"ray::slice_messages" in told_by(pid, "cmdline")]


def end(node: "subprocess.Popen[bytes]") -> None:
    """Kill a node of the cluster, and every process below it."""
    for pid in (*descendants(node.pid), node.pid):
        kill(pid)
    node.wait()


def told_by(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def descendants(pid: int) -> list[int]:
    """The processes below `pid`."""
    above = {
        int(process_folder.name): int(stat.rpartition(b")")[2].split()[1])
        for process_folder in Path("/proc").iterdir()
        if process_folder.name.isdecimal() and (stat := told_by(int(process_folder.name), "stat"))
    }
    below, pids = [pid], []
    while below:
        ancestor = below.pop()
        children = [child for child, parent in above.items() if parent == ancestor]
        pids += children
        below += children
    return pids


def kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def test_a_task_outlives_the_folder_that_ray_gave_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = tmp_path / "given"
    project.mkdir()
    (project / "small_thing.py").write_text("NAME = 'small'\n")
    (project / ".specverify").mkdir()
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(str(project))
    with ray_crew.own_folder() as task_folder:
        shutil.rmtree(project)
        assert Path.cwd() == task_folder != project
        assert (task_folder / "small_thing.py").read_text() == "NAME = 'small'\n"
        assert not (task_folder / ".specverify").exists()
        assert str(task_folder) in sys.path
        assert str(project) not in sys.path
    assert not task_folder.exists()
    assert Path.cwd().is_dir()
    monkeypatch.undo()


@pytest.mark.slow
def test_twenty_kills_of_driver_workers_and_nodes_change_no_result(tmp_path: Path) -> None:
    """Prints the figure of overhead: wall time of an undisturbed run there and here, per case."""
    pytest.importorskip("ray", reason="the package ray is not installed (pip install -e '.[fleet]')")
    cases, kills = 160, int(os.environ.get("SPECVERIFY_KILLS", "20"))
    (tmp_path / "specverify.toml").write_text(PROFILE.format(cases=cases))
    chance, spent = random.Random(5), {}

    def gate(*words: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "specverify", "gate", *words]
        return subprocess.Popen(command, cwd=tmp_path, env=here.variables, stderr=subprocess.DEVNULL)

    with LocalCluster(tmp_path) as here:
        on_ray = ("--ray", here.address)
        for name, words in (("alone", ()), ("whole", on_ray)):
            assert gate(*words, "--report", name).wait(900) == 0
            spent[name] = json.loads((tmp_path / name / "gate.json").read_text())["seconds"]
        killed: Counter[str] = Counter()
        rounds = 0
        while killed.total() < kills:
            rounds += 1
            name = f"killed{rounds}"
            driver = gate(*on_ray, "--report", name)
            while driver.poll() != 0:
                if driver.poll() is not None:
                    assert driver.returncode == -signal.SIGKILL
                    driver = gate(*on_ray, "--report", name)
                time.sleep(chance.uniform(3, 15))
                if killed.total() == kills or driver.poll() is not None:
                    continue
                what, workers = chance.choice(["driver", "driver", "worker", "worker", "node"]), here.workers()
                if what == "driver":
                    driver.kill()
                    driver.wait()
                elif what == "node":
                    here.lose_node()
                elif not workers or not kill(chance.choice(workers)):
                    continue
                killed[what] += 1
    summary = f"{dict(killed)} killed in {rounds} runs; seconds: {spent}; overhead "
    print(f"\n{summary}{1000 * (spent['whole'] - spent['alone']) / cases:.0f} ms per case")  # noqa: T201
    assert set(killed) == {"driver", "worker", "node"}
    for name in ("whole", *(f"killed{number + 1}" for number in range(rounds))):
        assert verdicts(tmp_path / name, "cpu-eager") == verdicts(tmp_path / "alone", "cpu-eager")
        assert counts(tmp_path / name) == counts(tmp_path / "alone")
