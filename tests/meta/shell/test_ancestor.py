"""Keepers that a campaign's ancestor forks: they serve a worker as its own would, and end with it."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from specverify.isolation import ancestor
from specverify.isolation.ancestor import Ancestor
from specverify.isolation.backend_spec import BackendSpec
from specverify.isolation.isolated import Isolated
from specverify.isolation.lifeline import children
from specverify.reference.trace import Trace
from tests.meta.shell.test_isolation import ROOT, case_of

CLEAN = BackendSpec("tests.strangers.hostile:clean")
ENDS_S = 10.0

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere an engine is a fresh interpreter")


@pytest.fixture(scope="module")
def forebear() -> Iterator[Ancestor]:
    ancestor_process = ancestor.start_ancestor()
    assert ancestor_process is not None
    yield ancestor_process
    ancestor_process.end()


@pytest.fixture(autouse=True)
def _no_keeper_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(ROOT))
    ancestor.end_keeper()
    yield
    ancestor.end_keeper()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def has_ended(pid: int) -> bool:
    until = time.monotonic() + ENDS_S
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.02)
    return not Path(f"/proc/{pid}").exists()


def take_keeper_of(forebear: Ancestor) -> None:
    control = forebear.keeper()
    assert control is not None
    ancestor.take_keeper(control)


def test_a_forked_keeper_serves_engines_and_ends_with_its_worker(forebear: Ancestor) -> None:
    before = children()
    take_keeper_of(forebear)
    with Isolated(CLEAN) as backend:
        assert isinstance(backend.subject(0).run_fresh(case_of(1)), Trace)
        engine = backend._engine
        assert engine is not None
        keeper = parent_of(engine.pid)
        assert parent_of(keeper) == forebear._process.pid
        assert children() == before, "this process has started no keeper of its own"
        ancestor.end_keeper()
    assert not Path(f"/proc/{engine.pid}").exists(), "engines are dead before their worker goes on"
    assert has_ended(keeper)


def test_an_engine_that_dies_is_replaced_by_a_forked_keeper(forebear: Ancestor) -> None:
    take_keeper_of(forebear)
    with Isolated(CLEAN) as backend:
        engine = backend._engine
        assert engine is not None
        os.kill(engine.pid, signal.SIGKILL)
        ancestor.own_keeper().listen(5.0)
        assert isinstance(backend.subject(0).run_fresh(case_of(2)), Trace)
        assert backend._engine is not None
        assert parent_of(parent_of(backend._engine.pid)) == forebear._process.pid


@pytest.mark.slow
def test_a_keeper_that_dies_is_replaced_by_one_of_the_workers_own_ancestor(forebear: Ancestor) -> None:
    take_keeper_of(forebear)
    with Isolated(CLEAN) as backend:
        assert backend._engine is not None
        keeper = parent_of(backend._engine.pid)
        os.kill(keeper, signal.SIGKILL)
        assert has_ended(keeper)
        assert ancestor.own_keeper().owner == os.getpid()
    with Isolated(CLEAN) as backend:
        assert backend._engine is not None
        own_ancestor_pid = parent_of(parent_of(backend._engine.pid))
        assert own_ancestor_pid != forebear._process.pid
        assert parent_of(own_ancestor_pid) == os.getpid()


def test_an_ancestor_that_is_ended_during_its_imports_leaves_nobody() -> None:
    before = children()
    own_ancestor = ancestor.start_ancestor()
    assert own_ancestor is not None
    control = own_ancestor.keeper()
    assert control is not None
    own_ancestor.end()
    assert children() == before
    assert control.recv(1) == b"", "the keeper was never forked, and its connection is closed"
    control.close()


def test_there_is_no_ancestor_where_engines_are_fresh_interpreters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch_npu.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert ancestor.start_ancestor() is None


def test_keepers_go_on_when_their_ancestor_ends_and_none_is_forked_after(forebear: Ancestor) -> None:
    """The last of the tests that ask the ancestor of the module for a keeper."""
    take_keeper_of(forebear)
    with Isolated(CLEAN) as backend:
        forebear.end()
        assert forebear.keeper() is None
        assert isinstance(backend.subject(0).run_fresh(case_of(3)), Trace)
