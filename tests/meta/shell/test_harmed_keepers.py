"""An engine that stops or kills the processes above it is a finding of its case, and no process outlives the worker."""

import multiprocessing as mp
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from specverify.campaign import crew as crew_module
from specverify.campaign.crew import Crew, _Hand
from specverify.campaign.messages import Died
from specverify.isolation import ancestor as ancestor_module
from specverify.isolation import keeper as keeper_module
from specverify.isolation.ancestor import end_keeper
from specverify.isolation.backend_spec import BackendSpec
from specverify.isolation.handle import Handle
from specverify.isolation.isolated import Isolated
from specverify.isolation.limits import Patience
from specverify.properties.verdict.subject import Crash
from specverify.reference.trace import Trace
from tests.meta.shell.test_isolation import ROOT, case_of
from tests.meta.shell.test_kills import processes, start_run
from tests.tiers import first

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are told apart by /proc")

HARM = {
    "keeper-stopped": "the backend's process left its keeper stopped (SIGSTOP): the keeper was continued",
    "keeper-killed": "the backend's process left its keeper dead (killed), which ends the process too",
    "keeper-killed-and-left": "the backend's process left its keeper dead (killed), which ends the process too",
    "keeper-outlived": "the backend's process left its keeper dead (killed), which ends the process too",
    "keeper-stopped-for-good": "the backend's process left its keeper stopped (SIGSTOP): the keeper was continued",
    "stopped": "the backend's process was stopped by a signal (SIGSTOP) and did not go on",
}
"""Deeds, and the words of their findings."""

ENDS_S = 10.0


@pytest.fixture(scope="module", autouse=True)
def mark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder whose name stands in the environment of every process that the tests of this module start."""
    folder = tmp_path_factory.mktemp("mark")
    end_keeper()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECVERIFY_MARK", str(folder))
        patch.syspath_prepend(str(ROOT))
        yield folder
        end_keeper()


def keeper() -> int:
    process = ancestor_module.own_keeper().process
    assert process is not None
    return process.pid


def still_running(mark: Path) -> dict[int, int]:
    until = time.monotonic() + ENDS_S
    while (processes_left := processes(mark)) and time.monotonic() < until:
        time.sleep(0.05)
    return processes_left


@pytest.mark.parametrize("deed", first(HARM, 1))
def test_harm_to_the_keeper_is_a_finding_of_the_case_that_ran(
    deed: str, mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "ENDED_S", 3.0)
    with Isolated(BackendSpec(f"tests.strangers.hostile:{deed.replace('-', '_')}"), Patience(60.0)) as backend:
        subject = backend.subject(0)
        assert isinstance(subject.run_fresh(case_of(1)), Trace)
        outcome = subject.run_fresh(case_of(0))
        assert isinstance(outcome, Crash)
        assert outcome.why == HARM[deed]
        assert isinstance(subject.run_fresh(case_of(2)), Trace), "another process has taken its place"
        assert backend.complaints == []
        engine = backend._engine
        assert engine is not None
    family = set(processes(mark))
    ancestors = {ancestor._process.pid for ancestor in ancestor_module._ancestors.values()}
    assert family <= {*ancestors, keeper()}, "no engine, and nothing that one left"


@pytest.mark.parametrize("deed", first(["ancestor-stopped", "ancestor-killed"], 1))
def test_an_ancestor_is_missed_only_when_a_keeper_is_wanted(deed: str) -> None:
    with Isolated(BackendSpec(f"tests.strangers.hostile:{deed.replace('-', '_')}"), Patience(60.0)) as backend:
        subject = backend.subject(0)
        for number in (0, 1):
            assert isinstance(subject.run_fresh(case_of(number)), Trace)
        assert backend._engine is not None
        os.kill(keeper(), 9)
        assert isinstance(subject.run_fresh(case_of(1)), Crash)
        assert isinstance(subject.run_fresh(case_of(2)), Trace)


@pytest.mark.slow
def test_an_order_that_a_dying_keeper_took_goes_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The socket of a killed process takes orders until its last thread has ended."""
    keeper_end, own_end = socket.socketpair()
    dying = keeper_module.KeeperClient(own_end)
    end_keeper()
    ancestor_module._own_keeper.append(dying)

    def take_order() -> None:
        keeper_end.recv(1)
        keeper_end.close()

    last_thread = threading.Thread(target=take_order)
    last_thread.start()
    with Isolated(BackendSpec("tests.strangers.hostile:clean"), Patience(60.0)) as backend:
        assert isinstance(backend.subject(0).run_fresh(case_of(1)), Trace)
        assert ancestor_module.own_keeper() is not dying
    last_thread.join()


def test_nobody_outlives_the_worker(mark: Path) -> None:
    end_keeper()
    assert still_running(mark) == {}


def test_a_stopped_worker_is_killed_and_the_words_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew_module, "LOOK_S", 0.0)
    context = mp.get_context("spawn")
    campaign_end, worker_end = context.Pipe()
    process = context.Process(target=wait, args=([worker_end], 600), daemon=True)
    process.start()
    assert process.pid is not None
    worker_end.close()
    crew = Crew.__new__(Crew)
    crew._hands, crew._next_look = [_Hand(None, process, campaign_end, Handle(process.pid))], 0.0  # type: ignore[arg-type]
    os.kill(process.pid, signal.SIGSTOP)
    messages: list[tuple[int, object]] = []
    until = time.monotonic() + 60
    while not messages and time.monotonic() < until:
        messages += crew.messages(0.01)
    assert messages == [(0, Died("signal SIGKILL, since it was stopped (SIGSTOP)"))]


@pytest.mark.slow
def test_a_stopped_worker_is_replaced_and_the_run_ends(tmp_path: Path) -> None:
    """An engine stops its worker in every case of one token or more: the run says so, and is no pass."""
    (tmp_path / "stopper.py").write_text(
        "import os, signal\n"
        "from pathlib import Path\n"
        "from tests.strangers.hostile import Hostile, parent_of\n"
        "def act():\n"
        "    keeper = os.getppid()\n"
        "    campaign = parent_of(parent_of(keeper))\n"
        "    words = Path(f'/proc/{campaign}/task/{campaign}/children').read_text().split()\n"
        "    for pid in map(int, words):\n"
        "        if b'spawn_main' in Path(f'/proc/{pid}/cmdline').read_bytes():\n"
        "            os.kill(pid, signal.SIGSTOP)\n"
        "class Stopper(Hostile):\n"
        "    def run(self, case):\n"
        "        act()\n"
        "        return self._oracle(case)\n"
        "def open_():\n"
        "    return Stopper(None, None)\n"
    )
    run = start_run(tmp_path, "stopper:open_", jobs=1)
    assert run.wait(600) == 3
    log = " ".join((tmp_path / "log").read_text().split())
    assert "signal SIGKILL, since it was stopped (SIGSTOP)" in log
    assert still_running(tmp_path) == {}
