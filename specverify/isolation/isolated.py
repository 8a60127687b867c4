"""A backend in a process of its own, as a Subject: what breaks becomes an outcome, and the process is replaced."""

import time
from dataclasses import dataclass, field
from typing import Any

from backends.base import Declaration, Unavailable, WrongFlag
from backends.registry import UnknownBackend
from properties.verdict.subject import Crashed, Declined, Live, NoTrace, Subject
from reference.case import Case
from reference.probability_world import Blocks, Given, World
from reference.session import Action
from reference.trace import Array, Stage, Trace
from specverify.isolation.keeping import Lost
from specverify.isolation.limits import Patience, processor_s
from specverify.isolation.process import EngineProcess, Limits
from specverify.isolation.wanted import Wanted
from specverify.setup.admits import outside
from specverify.setup.errors import MissingInput, UnusableInput
from specverify.setup.selection import Unknown

COMPLAINTS: dict[str, type[Exception]] = {
    one.__name__: one for one in (Unknown, UnknownBackend, UnusableInput, WrongFlag, Unavailable, MissingInput)
}
"""The errors of opening a backend, by the name that crosses from the other process."""

OPENING_S = 1800.0
"""Seconds that a backend may take to open."""


@dataclass
class Isolated:
    """An open backend in another process, which is started anew whenever it breaks.

    Attributes:
        wanted: What is open.
        patience: How long an answer may take.
        memory: Bytes that the process may hold, or None.
        declaration: As the backend declares itself.
        manifest: What of a run depends on the backend, in words.
        complaints: One line for each time that the process ended while nobody asked anything of it.

    Raises:
        Unknown, UnknownBackend, UnusableInput, WrongFlag, Unavailable, MissingInput: when it cannot be opened.
    """

    wanted: Wanted
    patience: Patience = field(default_factory=Patience)
    memory: int | None = None
    complaints: list[str] = field(default_factory=list)
    _engine: EngineProcess | None = None
    _opened: int = 0
    _admitted: list[tuple[Any, ...]] = field(default_factory=list)
    _last: Case | None = None

    def __post_init__(self) -> None:
        try:
            facts = self._open()
        except Lost as lost:
            last = f": {lost.said[-1]}" if lost.said else ""
            raise Unavailable(f"{self.wanted.backend}: its process {lost.how} while it was opened{last}") from None
        self.declaration: Declaration = facts["declaration"]
        self.manifest: dict[str, str] = facts["manifest"]
        self._has_tables: bool = facts["tables"]
        self._serves: bool = facts["serves"]

    def _open(self) -> dict[str, Any]:
        engine = EngineProcess(vars(self.wanted))
        answer = engine.ask(("open",), Limits(OPENING_S, self.memory))
        if answer[0] == "refused":
            engine.end()
            raise COMPLAINTS.get(answer[1], Unavailable)(answer[2])
        self._engine, self._opened = engine, self._opened + 1
        for request in self._admitted:
            engine.ask(request, Limits(OPENING_S, self.memory))
        facts: dict[str, Any] = answer[1]
        return facts

    def subject(self, keep: int = 48) -> Subject:
        """The backend as invariants see it."""
        declared = self.declaration

        def run(case: Case) -> Trace | Declined | Crashed:
            reason = outside(declared, case)
            if reason is not None:
                return Declined(reason)
            try:
                trace: Trace = self.ask("run", case)
            except NoTrace as absent:
                return absent.outcome
            finally:
                self._last = case
            return trace

        tables = RemoteTables(self) if self._has_tables else None
        serve = self._serve if self._serves else None
        subject = Subject(declared.name, run, declared.reveals, keep, tables, declared.takes_tape, serve)
        subject.declines = lambda case: outside(declared, case)
        subject.variant_interval = declared.variant_interval
        return subject

    def ask(self, *request: Any) -> Any:
        """The answer to `request`, one of the words of `specverify.isolation.engine`.

        Raises:
            NoTrace: when the backend declined, broke, or its process did.
        """
        try:
            engine = self._alive()
            began = time.monotonic()
            kind, told, *left = engine.ask(request, Limits(self.patience.seconds, self.memory))
        except Lost as lost:
            self._engine = None
            if lost.hung:
                self.patience.hung()
            raise NoTrace(Crashed(None, f"the backend's process {lost.how}", lost.said)) from None
        self.patience.answered(time.monotonic() - began)
        if any(left):
            # Whatever a run changed in its process ends with the process: the next run is what it is alone.
            engine.end()
            self._engine = None
        if kind != "told":
            raise NoTrace(told)
        return told

    def _alive(self) -> EngineProcess:
        if self._engine is not None and (how := self._engine.gone) is not None:
            after = f" after case {self._last.id}" if self._last is not None else ""
            self.complaints.append(f"the backend's process {how} between two cases{after}: replaced")
            self._engine.end()
            self._engine = None
        if self._engine is None:
            try:
                self._open()
            except Exception as why:
                if isinstance(why, Lost):
                    raise
                raise Lost(f"could not be opened again ({why})") from why
        assert self._engine is not None
        return self._engine

    def admit(self, names: tuple[str, ...], vocabularies: tuple[int, ...] = ()) -> None:
        """Admit custom processors in the backend's process, and in every one that replaces it."""
        if names:
            self._admitted.append(("admit", names, vocabularies))
            self.ask(*self._admitted[-1])

    def _serve(self, case: Case) -> Live:
        reason = outside(self.declaration, case)
        if reason is not None:
            raise NoTrace(Declined(reason))
        return RemoteLive(self, case)

    @property
    def processor_s(self) -> float:
        """Seconds of processor time that the process which is open now has used."""
        return 0.0 if self._engine is None else processor_s(self._engine.pid)

    @property
    def generation(self) -> int:
        """How many processes have been opened so far."""
        return self._opened

    def close(self) -> None:
        """End the process."""
        if self._engine is not None:
            self._engine.end()
            self._engine = None

    def __enter__(self) -> "Isolated":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RemoteTables:
    """A backend's tables in its own process; see `properties.verdict.subject.Tables`."""

    def __init__(self, backend: Isolated) -> None:
        self._backend = backend

    def verify(self, given: Given, tape: Array) -> Blocks:
        """Accept from settled probabilities."""
        return self._asked("verify", given, tape)

    def rounds(self, world: World, tape: Array) -> Blocks:
        """Draft and accept."""
        return self._asked("rounds", world, tape)

    def samples(self, world: World, seeds: Array) -> Blocks:
        """Draft and accept on the backend's own random numbers."""
        return self._asked("samples", world, seeds)

    def _asked(self, method: str, *arguments: Any) -> Blocks:
        try:
            blocks: Blocks = self._backend.ask("tables", method, *arguments)
        except NoTrace as absent:
            outcome = absent.outcome
            if isinstance(outcome, Crashed) and outcome.stage is None:
                outcome = Crashed(Stage.ACCEPTED, outcome.why, outcome.said)
            raise NoTrace(outcome) from None
        return blocks


class RemoteLive:
    """A live session in the backend's own process; it ends with that process."""

    _made = 0

    def __init__(self, backend: Isolated, case: Case) -> None:
        RemoteLive._made += 1
        self._number = RemoteLive._made
        self._backend = backend
        backend.ask("serve", self._number, case)
        self._generation = backend.generation

    def do(self, action: Action) -> None:
        """As `backends.base.Live.do`; raises NoTrace."""
        self._ask("do", action)

    @property
    def trace(self) -> Trace:
        """As `backends.base.Live.trace`; raises NoTrace."""
        trace: Trace = self._ask("trace")
        return trace

    def _ask(self, word: str, *arguments: Any) -> Any:
        if self._backend.generation != self._generation:
            raise NoTrace(Crashed(None, "the session ended with the backend's process"))
        return self._backend.ask(word, self._number, *arguments)
