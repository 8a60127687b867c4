"""The number of threads: what a process may use, what is faster, and what an engine's process is given."""

import os
from pathlib import Path

import pytest

from specverify.campaign import threads
from specverify.isolation import control_groups
from specverify.isolation.ancestor import end_keeper
from specverify.isolation.backend_spec import BackendSpec
from specverify.isolation.isolated import Isolated
from specverify.isolation.usable_cores import usable_cores
from specverify.plan import Plan, default_jobs
from specverify.reference.trace import Trace
from tests.cases import SHORTEST

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 8), ("250000 100000", 3), ("50000 100000", 1), ("nonsense", 8), ("", 8)]
)
def test_a_container_has_its_share_of_the_cores(
    quota: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if quota:
        (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(control_groups, "MOUNTED", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert usable_cores() == cores
    assert default_jobs("cpu") == min(cores, 4)


@pytest.mark.parametrize(("quota", "cores"), [("-1", 8), ("250000", 3)])
def test_version_1_of_control_groups_has_two_files(
    quota: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tmp_path / "mounted" / "cpu" / "job"
    job.mkdir(parents=True)
    (job / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (job / "cpu.cfs_period_us").write_text("100000\n")
    (tmp_path / "own").write_text("2:cpu,cpuacct:/job\n1:memory:/\n")
    monkeypatch.setattr(control_groups, "MOUNTED", tmp_path / "mounted")
    monkeypatch.setattr(control_groups, "OWN", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert usable_cores() == cores


@pytest.mark.parametrize(
    ("seconds", "faster"),
    [
        ({1: [2.0, 2.0], 4: [1.0, 1.0]}, 4),
        ({1: [1.0], 4: [2.0]}, 1),
        ({1: [1.0], 4: [0.8]}, 1),
        ({1: [2.0, 2.0], 4: [1.0, 9.0]}, 1),
    ],
    ids=["faster", "slower", "hardly faster", "faster by chance"],
)
def test_several_threads_are_taken_where_they_are_worth_it(
    seconds: dict[int, list[float]], faster: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, counts = 0.0, [0]

    def run() -> None:
        nonlocal now
        now += seconds[counts[-1]].pop(0) if counts[-1] else 50.0

    monkeypatch.setattr(threads, "usable_cores", lambda: 4)
    monkeypatch.setattr("time.perf_counter", lambda: now)
    assert threads.faster_count(counts.append, run) == faster
    assert counts[-1] == faster
    assert now > 50, "the first run, which reads the weights, is not timed"


def test_an_engine_computes_with_the_threads_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    with Isolated(BackendSpec("tests.strangers.thread_counter:open_")) as backend:
        counts = []
        for count in (1, 3):
            backend.set_threads(count)
            trace = backend.subject(keep=0).outcome(SHORTEST)
            assert isinstance(trace, Trace), trace
            counts.append(trace.fallbacks)
        assert counts == [{"1 threads": 1}, {"3 threads": 1}]
        # What it is given is no residue of a run, and a replacement has it too.
        assert not backend.residue
        backend.close()
        again = backend.subject(keep=0).outcome(SHORTEST)
        assert isinstance(again, Trace)
        assert again.fallbacks == {"3 threads": 1}
    end_keeper()


def test_the_number_of_the_user_is_the_engines() -> None:
    assert Plan(threads=2).backend_spec.threads == 2
    assert Plan(model="somewhere", threads=2).backend_spec.threads == 2
    assert (Plan().backend_spec.threads, Plan(model="somewhere").backend_spec.threads) == (1, 0)
