"""Subject: a backend as invariants see it, a memoised Case -> Trace that never raises what it cannot explain."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from properties.commits import counted
from reference.case import Case
from reference.probability_world import Blocks, Given, World
from reference.session import Action
from reference.trace import Array, Stage, Trace


@dataclass(frozen=True)
class Declined:
    """The backend does not take the case, for the reason `why`."""

    why: str


@dataclass(frozen=True)
class Crashed:
    """The run broke: at `stage` if the engine could tell, with `why` in one line.

    Attributes:
        stage: Where it broke, or None.
        why: The reason in one line.
        said: The run's last lines, the latest last: frames of the traceback, `file:line in function: source line`, or
            what the backend's process printed before it died. Two breaks are equal whatever their runs said.
    """

    stage: Stage | None
    why: str
    said: tuple[str, ...] = field(default=(), compare=False)


Run = Callable[[Case], "Trace | Declined | Crashed"]


class NoTrace(Exception):
    """Raised to an invariant that asks for a trace where there is none; `outcome` says why."""

    def __init__(self, outcome: Declined | Crashed) -> None:
        super().__init__(outcome.why)
        self.outcome = outcome


class Tables(Protocol):
    """A backend's own drafting and acceptance on tables in place of models; raises NoTrace where it cannot.

    What each method does is said at `backends.base.ExactLaw`.
    """

    def verify(self, given: Given, tape: Array) -> Blocks:
        """Accept from settled probabilities."""
        ...

    def rounds(self, world: World, tape: Array) -> Blocks:
        """Draft and accept."""
        ...

    def samples(self, world: World, seeds: Array) -> Blocks:
        """Draft and accept on the backend's own random numbers."""
        ...


class Live(Protocol):
    """A session that goes on; `do` raises NoTrace where it breaks. See `backends.base.Live`."""

    def do(self, action: Action) -> None:
        """Do one thing."""
        ...

    @property
    def trace(self) -> Trace:
        """What happened so far."""
        ...


Serve = Callable[[Case], Live]
"""Opens the session of a case; raises NoTrace where it cannot."""


class Subject:
    """A backend under test.

    Attributes:
        name: The backend's name.
        reveals: Stages its traces may hold.
        tables: Its sampling on tables, or None if it has no such door.
        takes_tape: Whether its coins are those of the case's tape.
        serve: Its sessions, action by action, or None if it has no such door.
        declines: Why its declaration does not admit a case, or None.
        retold: Whether the case's script was made of the trees of its own run (`properties.verdict.session_members`):
            to compare the two would say nothing.
        variant_interval: How many times as seldom invariants that take turns are asked of it; its control is as much
            shorter.
        forward_s: Seconds inside its forwards so far, over every run.
        attention_calls: Layers of its forwards so far.
        fallbacks: Why its attention took a slower path, and in how many of those.
        commits: Commits so far that asked for a faster way, by the way; `commit_fallbacks`: why some took another.
        runs: Runs so far.
        notes: What invariants computed once for a case and share, by key.
    """

    def __init__(
        self,
        name: str,
        run: Run,
        reveals: frozenset[Stage],
        keep: int = 48,
        tables: Tables | None = None,
        takes_tape: bool = False,
        serve: Serve | None = None,
    ) -> None:
        self.name = name
        self.reveals = reveals
        self.tables = tables
        self.takes_tape = takes_tape
        self.serve = serve
        self.declines: Callable[[Case], str | None] = lambda case: None
        self.variant_interval = 1
        self.retold = False
        self.forward_s = 0.0
        self.attention_calls = 0
        self.fallbacks: Counter[str] = Counter()
        self.commits: Counter[str] = Counter()
        self.commit_fallbacks: Counter[str] = Counter()
        self.runs = 0
        self.notes: OrderedDict[object, object] = OrderedDict()
        self._run = run
        self._keep = keep
        self._memo: OrderedDict[tuple[Case, int], Trace | Declined | Crashed] = OrderedDict()
        self._asked: dict[Case, None] | None = None

    def __call__(self, case: Case) -> Trace:
        """The backend's trace of `case`, run once and remembered.

        Raises:
            NoTrace: when the backend declined the case or its run broke.
        """
        return self._answer(case, 0)

    def remember(self, case: Case, trace: Trace) -> None:
        """Take `trace` for the answer to `case`: another subject ran it, and counts its seconds and its commits."""
        self._memo[case, 0] = trace

    def again(self, case: Case, time: int = 1) -> Trace:
        """A second run of `case` (or a third, for `time` 2), remembered apart from the first."""
        return self._answer(case, time)

    def fresh(self, case: Case) -> "Trace | Declined | Crashed":
        """The outcome of one run of `case`, neither remembered nor counted."""
        return self._run(case)

    def _answer(self, case: Case, time: int) -> Trace:
        key = (case, time)
        if self._asked is not None:
            self._asked[case] = None
        if key not in self._memo:
            outcome = self._run(case)
            self.runs += 1
            if isinstance(outcome, Trace):
                self.forward_s += outcome.forward_s
                self.attention_calls += outcome.attention_calls
                self.fallbacks.update(outcome.fallbacks)
                asked, fell_back = counted(case, outcome)
                self.commits.update(asked)
                self.commit_fallbacks.update(fell_back)
            self._memo[key] = outcome
            while len(self._memo) > self._keep:
                self._memo.popitem(last=False)
        outcome = self._memo[key]
        if not isinstance(outcome, Trace):
            raise NoTrace(outcome)
        return outcome

    @contextmanager
    def asked(self) -> Iterator[dict[Case, None]]:
        """The cases that it is asked for inside the `with`, in order, remembered ones included."""
        asked: dict[Case, None] = {}
        self._asked = asked
        try:
            yield asked
        finally:
            self._asked = None

    def noted(self, key: object, make: Callable[[], object]) -> object:
        """`make()`, computed once per key."""
        if key not in self.notes:
            self.notes[key] = make()
            while len(self.notes) > self._keep:
                self.notes.popitem(last=False)
        return self.notes[key]
