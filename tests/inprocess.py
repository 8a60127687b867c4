"""Workers and backends that are calls in this process, so that a command under test costs no five seconds more."""

import signal
from collections import deque
from collections.abc import Iterator

import pytest

from specverify.backends.base import Declaration
from specverify.campaign import campaign, worker
from specverify.campaign.messages import Broken
from specverify.cli import main
from specverify.isolation import door, here
from specverify.isolation.backend_spec import BackendSpec
from specverify.isolation.limits import Patience
from specverify.plan import Plan
from specverify.properties.residue import Residue
from specverify.properties.verdict.subject import Subject
from specverify.setup import processors
from specverify.setup.subjects import manifest, open_planted, subject_of


class Here:
    """A stand-in for `specverify.isolation.isolated.Isolated`: the backend is opened in this process."""

    def __init__(self, spec: BackendSpec) -> None:
        backend = open_planted(spec.backend, spec.fault, spec.mode)
        self._backend = backend
        self.declaration: Declaration = backend.declaration
        self.manifest = manifest(backend)
        self.complaints: list[str] = []
        self.residue: dict[str, Residue] = {}

    def subject(self, keep: int = 48) -> Subject:
        return subject_of(self._backend, keep)

    def admit(self, names: tuple[str, ...], vocabularies: tuple[int, ...] = ()) -> None:
        processors.admit(names, *vocabularies)

    def set_threads(self, count: int) -> None:
        """Nothing: this process has a number of its own."""

    def __enter__(self) -> "Here":
        return self

    def __exit__(self, *_: object) -> None: ...


def open_here(spec: BackendSpec, patience: Patience | None = None, memory: int | None = None) -> door.Door:
    """A stand-in for `door.open_backend`, which opens objects of this process here as it is."""
    return here.Here(spec) if here.is_here(spec.backend) else Here(spec)


class Silent:
    """Orders that never come."""

    def stop(self) -> bool:
        return False

    def no_more(self) -> bool:
        return False


class CrewHere:
    """A stand-in for `specverify.campaign.crew.Crew`: every worker has ended when it is made."""

    def __init__(self, plan: Plan, deadline: float) -> None:
        self._queue: deque[tuple[int, object]] = deque()
        before = signal.getsignal(signal.SIGINT)
        for number in range(plan.jobs):
            self._work(number, plan.slice(number))
        signal.signal(signal.SIGINT, before)

    def _work(self, number: int, plan: Plan) -> None:
        try:
            worker.work(plan, lambda message: self._queue.append((number, message)), Silent())  # type: ignore[arg-type]
        except worker.Refused as why:
            self._queue.append((number, Broken(str(why), why.code)))

    def messages(self, timeout: float) -> Iterator[tuple[int, object]]:
        while self._queue:
            yield self._queue.popleft()

    def tell(self, word: str, but: int | None = None) -> None: ...

    def end(self) -> None: ...


def exit_code_of(*words: object) -> int:
    """Run a command of the shell in this process; its exit code."""
    with pytest.raises(SystemExit) as exit_:
        main([*map(str, words)])
    assert isinstance(exit_.value.code, int)
    return exit_.value.code


def in_this_process(patch: pytest.MonkeyPatch) -> None:
    """Run campaigns and backends of commands in this process."""
    patch.setattr(door, "open_backend", open_here)
    patch.setattr(campaign, "Crew", CrewHere)
