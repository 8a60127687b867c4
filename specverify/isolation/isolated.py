"""A backend in a process of its own, as a Subject for invariants.

A crash, a hang or a broken limit becomes the outcome of its case, and another process takes the place of the broken
one.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specverify.backends.base import Declaration, Unavailable, WrongFlag
from specverify.backends.registry import UnknownBackend
from specverify.isolation.backend_spec import PREPARE, THREADS, VARIANT, BackendSpec
from specverify.isolation.keeper import Lost
from specverify.isolation.limits import Patience, processor_s
from specverify.isolation.process import EngineProcess, Limits
from specverify.properties.residue import Residue
from specverify.properties.verdict.subject import Crash, Live, NoTrace, Refusal, Subject
from specverify.reference.case import Case
from specverify.reference.probability_world import Blocks, GivenTree, World
from specverify.reference.session import Action
from specverify.reference.trace import Array, Stage, Trace
from specverify.setup.errors import MissingInput, UnusableInput
from specverify.setup.selection import Unknown

COMPLAINTS: dict[str, type[Exception]] = {
    error.__name__: error for error in (Unknown, UnknownBackend, UnusableInput, WrongFlag, Unavailable, MissingInput)
}
"""The errors of opening a backend, by the name that the engine's process sends."""


@dataclass
class Isolated:
    """An open backend in another process, which is started again whenever it breaks.

    Attributes:
        spec: The backend to open, and how.
        patience: The time limit of an answer.
        memory: Bytes that the process may hold, or None.
        declaration: The backend's declaration of itself.
        manifest: The facts of a run that depend on the backend, such as device and mode.
        complaints: One line for each time that the process ended between two requests.
        residue: What runs left in their process and that changes no answer, by kind, each with the first case.

    Raises:
        Unknown, UnknownBackend, UnusableInput, WrongFlag, Unavailable, MissingInput: The backend cannot be opened.
    """

    spec: BackendSpec
    patience: Patience = field(default_factory=Patience)
    memory: int | None = None
    complaints: list[str] = field(default_factory=list)
    residue: dict[str, Residue] = field(default_factory=dict)
    _engine: EngineProcess | None = None
    _opened: int = 0
    _admitted: list[tuple[Any, ...]] = field(default_factory=list)
    _last: Case | None = None

    def __post_init__(self) -> None:
        try:
            facts = self._open()
        except Lost as lost:
            last = f": {lost.last_lines[-1]}" if lost.last_lines else ""
            raise Unavailable(f"{self.spec.backend}: its process {lost.how} while it was opened{last}") from None
        self.declaration: Declaration = facts["declaration"]
        self.manifest: dict[str, str] = facts["manifest"]
        self._has_tables: bool = facts["tables"]
        self._serves: bool = facts["serves"]
        self._shares: bool = facts["shares"]
        self._prepares: bool = facts["prepares"]

    def _open(self) -> dict[str, Any]:
        engine = EngineProcess(vars(self.spec))
        answer = engine.ask(("open",), Limits(self.patience.start_s, self.memory))
        if answer[0] == "refused":
            engine.end()
            raise COMPLAINTS.get(answer[1], Unavailable)(answer[2])
        declared: dict[str, str] = dict(answer[1]["declaration"].environment)
        if declared and not self.spec.variables:
            # The declaration is known when its module is imported, and its variables must be there before.
            engine.end()
            self.spec = replace(self.spec, variables=tuple(declared.items()))
            return self._open()
        engine.watch.begin()
        self._engine = engine
        self._opened += 1
        # A replacement must know the custom processors that earlier processes admitted.
        for request in self._admitted:
            engine.ask(request, Limits(self.patience.start_s, self.memory))
        facts: dict[str, Any] = answer[1]
        return facts

    def subject(self, keep: int = 48) -> Subject:
        """The backend as invariants see it."""
        declared = self.declaration

        def run(case: Case, word: str = "run", *arguments: Any) -> Trace | Refusal | Crash:
            try:
                # A case outside the declaration is refused by its run, and no engine is opened for it.
                if self._prepares and declared.outside(case) is None:
                    self._prepare(case)
                trace: Trace = self.ask(word, case, *arguments)
            except NoTrace as absent:
                return absent.outcome
            finally:
                self._last = case
            return trace

        tables = RemoteTables(self) if self._has_tables else None
        serve = self._serve if self._serves else None
        subject = Subject(declared.name, run, declared.reveals, keep, tables, declared.takes_tape, serve)
        subject.abilities = declared
        subject.declines = declared.outside
        subject.watch = None if declared.takes_tape else lambda case: run(case, "watch")
        subject.share = (lambda case, extends: run(case, VARIANT, extends)) if self._shares else None
        subject.variant_interval = declared.variant_interval
        subject.tables_dtype = declared.tables_dtype
        return subject

    def _prepare(self, case: Case) -> None:
        """Open what the case needs, within the time limit of opening.

        Raises:
            NoTrace: The backend declined or raised, or its process ended, hung or held too much memory.
            Unavailable: The engine was not open in time, or the engine behind the backend is gone.
        """
        try:
            engine = self._alive()
            kind, value, *_ = engine.ask((PREPARE, case), Limits(self.patience.start_s, self.memory))
        except Lost as lost:
            self._engine = None
            if lost.hung:
                limit = f"within {self.patience.start_s:.3g} s (--start-timeout)"
                raise Unavailable(f"{self.spec.backend}: no engine was open {limit}") from None
            how = f"{lost.how} while it was opened for the case"
            raise NoTrace(Crash(None, f"the backend's process {how}", lost.last_lines)) from None
        engine.watch.begin()
        if kind == "gone":
            raise Unavailable(value)
        if kind != "told":
            raise NoTrace(value)

    def ask(self, *request: Any) -> Any:
        """The answer to `request`, one of the words of `specverify.isolation.engine`.

        Raises:
            NoTrace: The backend declined or raised, or its process ended, hung or held too much memory.
            Unavailable: The engine behind the backend, such as a server, is gone.
        """
        try:
            engine = self._alive()
            began = time.monotonic()
            kind, value, is_changed, phrases = engine.ask(request, Limits(self.patience.seconds, self.memory))
        except Lost as lost:
            self._engine = None
            if lost.hung:
                self.patience.note_hang()
            raise NoTrace(Crash(None, f"the backend's process {lost.how}", lost.last_lines)) from None
        # Only answers that came count towards the median.
        self.patience.note_answer(time.monotonic() - began)
        self._note(request, phrases, engine)
        if is_changed:
            # The run left global state changed: end the process, so that the next run starts in a clean one.
            engine.end()
            self._engine = None
        if kind == "gone":
            raise Unavailable(value)
        if kind != "told":
            raise NoTrace(value)
        return value

    def _note(self, request: tuple[Any, ...], phrases: dict[str, str], engine: EngineProcess) -> None:
        """Note what the run of `request` left, each kind once for the backend."""
        case = next((part for part in request if isinstance(part, Case)), self._last)
        phrases_by_kind = {kind: (phrase, case) for kind, phrase in phrases.items()} | engine.watch.look(case)
        for kind, (phrase, first_case) in phrases_by_kind.items():
            if kind not in self.residue:
                self.residue[kind] = Residue(kind, phrase, "" if first_case is None else first_case.id)

    def _alive(self) -> EngineProcess:
        if self._engine is not None and (how := self._engine.ending) is not None:
            after = f" after case {self._last.id}" if self._last is not None else ""
            self.complaints.append(f"the backend's process {how} between two cases{after}: replaced")
            self._engine.end()
            self._engine = None
        if self._engine is None:
            try:
                self._open()
            except Exception as why:
                if isinstance(why, (Lost, Unavailable)):
                    raise
                if isinstance(why, OSError):
                    # This process cannot start another, whatever the backend does: its folder may be gone.
                    raise Unavailable(f"{self.spec.backend}: no further process could be started ({why})") from why
                raise Lost(f"could not be opened again ({why})") from why
        assert self._engine is not None
        return self._engine

    def admit(self, names: tuple[str, ...], vocabularies: tuple[int, ...] = ()) -> None:
        """Admit custom processors in the backend's process and in every replacement."""
        if names:
            self._admitted.append(("admit", names, vocabularies))
            self.ask(*self._admitted[-1])

    def set_threads(self, count: int) -> None:
        """Give the backend `count` torch threads, in its process and in every replacement."""
        self.spec = replace(self.spec, threads=count)
        engine = self._alive()
        engine.ask((THREADS, count), Limits(self.patience.start_s, self.memory))

    def _serve(self, case: Case) -> Live:
        return RemoteLive(self, case)

    @property
    def processor_s(self) -> float:
        """Seconds of processor time that the current process has used."""
        return 0.0 if self._engine is None else processor_s(self._engine.pid)

    @property
    def generation(self) -> int:
        """The number of processes opened so far."""
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
    """The tables of a backend in another process; see `specverify.properties.verdict.subject.Tables`."""

    def __init__(self, backend: Isolated) -> None:
        self._backend = backend

    def verify(self, given: GivenTree, tape: Array) -> Blocks:
        """Run acceptance on a given tree with given probabilities, on coins from `tape`."""
        blocks: Blocks = self._ask_tables("verify", given, tape)
        return blocks

    def rounds(self, world: World, tape: Array) -> Blocks:
        """Run drafting and acceptance in `world`, on coins from `tape`."""
        blocks: Blocks = self._ask_tables("rounds", world, tape)
        return blocks

    def samples(self, world: World, seeds: Array) -> Blocks:
        """Run drafting and acceptance in `world`, on the backend's own random numbers from `seeds`."""
        blocks: Blocks = self._ask_tables("samples", world, seeds)
        return blocks

    def batches(self, world: World, seeds: Sequence[Array]) -> tuple[Blocks, ...]:
        """Run `samples` on each array of seeds, by one request for all of them."""
        blocks: tuple[Blocks, ...] = self._ask_tables("batches", world, seeds)
        return blocks

    def _ask_tables(self, method: str, *arguments: Any) -> Any:
        try:
            return self._backend.ask("tables", method, *arguments)
        except NoTrace as absent:
            outcome = absent.outcome
            if isinstance(outcome, Crash) and outcome.stage is None:
                # Tables run drafting and acceptance alone, so that a crash without a stage is one of acceptance.
                outcome = Crash(Stage.ACCEPTED, outcome.why, outcome.said)
            raise NoTrace(outcome) from None


class RemoteLive:
    """A live session in the backend's process; the session ends with that process."""

    _num_made = 0

    def __init__(self, backend: Isolated, case: Case) -> None:
        RemoteLive._num_made += 1
        self._number = RemoteLive._num_made
        self._backend = backend
        backend.ask("serve", self._number, case)
        self._generation = backend.generation

    def do(self, action: Action) -> None:
        """As `specverify.backends.base.Live.do`; raises NoTrace."""
        self._ask("do", action)

    @property
    def trace(self) -> Trace:
        """As `specverify.backends.base.Live.trace`; raises NoTrace."""
        trace: Trace = self._ask("trace")
        return trace

    def _ask(self, word: str, *arguments: Any) -> Any:
        if self._backend.generation != self._generation:
            raise NoTrace(Crash(None, "the session ended with the backend's process"))
        return self._backend.ask(word, self._number, *arguments)
