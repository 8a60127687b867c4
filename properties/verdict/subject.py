"""Subject: a backend as invariants see it, a memoised function Case -> Trace.

Where there is no trace, it raises NoTrace with the reason.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from specverify.reference.abilities import LOGPROBS, Abilities
from specverify.reference.architecture import Checkpoint
from specverify.reference.case import Case
from specverify.reference.probability_world import Blocks, GivenTree, World
from specverify.reference.session import Action
from specverify.reference.trace import Array, Stage, Trace
from specverify.reference.trace_memory import TraceMemory


@dataclass(frozen=True)
class Refusal:
    """The backend does not take the case; `why` is the reason."""

    why: str


@dataclass(frozen=True)
class Crash:
    """The run broke.

    Attributes:
        stage: The stage in which it broke, or None where the engine could not tell.
        why: The reason in one line.
        said: The run's last lines, the latest last: frames of the traceback, `file:line in function: source line`, or
            the lines that the backend's process printed before it died. They do not count in comparisons.
        is_contract: Whether what a user's function returned is no answer in any form of its contract.
    """

    stage: Stage | None
    why: str
    said: tuple[str, ...] = field(default=(), compare=False)
    is_contract: bool = False


Run = Callable[[Case], "Trace | Refusal | Crash"]

FASTER = ("fast", "length")
"""Values of `KvLayout.commit` from which an engine may fall back to `path`."""

WATCHED, SHARED, EXTENDED = -1, -2, -3
"""The `time` of a run whose random draws are recorded, and of variants on a shared prefill; see `Subject.run_again`."""

LONG_PROMPT = 300
"""Tokens of a prompt beyond which a run spends more on its prefill than on its steps.

It is the longest of the ordinary prompts that `specverify.properties.strategies.prompts` draws.
"""


class NoTrace(Exception):
    """Raised to an invariant that asks for a run without a trace; `outcome` says why there is none."""

    def __init__(self, outcome: Refusal | Crash) -> None:
        super().__init__(outcome.why)
        self.outcome = outcome


class Tables(Protocol):
    """A backend's own drafting and acceptance on tables in place of models; raises NoTrace where it cannot run them.

    `specverify.backends.base.ExactLaw` describes each method.
    """

    def verify(self, given: GivenTree, tape: Array) -> Blocks:
        """Accept a drafted tree whose laws are given."""
        ...

    def rounds(self, world: World, tape: Array) -> Blocks:
        """Draft a tree and accept, on the coins of a tape."""
        ...

    def samples(self, world: World, seeds: Array) -> Blocks:
        """Draft a tree and accept, on the backend's own random numbers."""
        ...

    def batches(self, world: World, seeds: Sequence[Array]) -> tuple[Blocks, ...]:
        """The blocks of several calls of `samples`, one after the other, each on an array of seeds of its own."""
        ...


class Live(Protocol):
    """A session in progress; `do` raises NoTrace where the session breaks. See `specverify.backends.base.Live`."""

    def do(self, action: Action) -> None:
        """Carry out one action."""
        ...

    @property
    def trace(self) -> Trace:
        """The trace of the session so far."""
        ...


SHOWN_INTERVAL = 2
"""The interval at which variants are asked of a backend that shows every stage."""


@dataclass(frozen=True)
class Pace:
    """How often a backend is asked by the invariants that take turns.

    Attributes:
        interval: The factor by which they have their turns more seldom.
        shows_all: Whether the backend shows every stage. Each case is then judged stage by stage from its own run, and
            of 61 faults that were found at full turns and at half of them, 59 were found by the same case.
    """

    interval: int = 1
    shows_all: bool = False


FULL = Pace()
"""The pace at which variants have all their turns."""

Serve = Callable[[Case], Live]
"""Function that opens the session of a case; raises NoTrace where it cannot."""


class Subject:
    """A backend under test.

    Attributes:
        reveals: Stages that the backend's traces may hold.
        tables: The backend's sampling on tables, or None if it does not offer that.
        takes_tape: Whether the backend's coins are those of the case's tape.
        serve: Opens the backend's live sessions, or None if it does not offer them.
        share: Runs a variant on the columns of an earlier variant's prefill, or None where no backend can; the second
            argument is that of `specverify.backends.base.SharesPrefills.run_variant`.
        watch: Runs a case with its random draws recorded (`Trace.draws`), or None where nobody can look.
        abilities: The cases that the backend takes, within which cases are drawn; None for cases of any kind.
        declines: Function from a case to the reason why the declaration does not admit it, or None.
        tables_dtype: The dtype in which the backend's sampling computes on given tables.
        retold: Whether the case's script was made of the trees of its own run
            (`specverify.properties.verdict.session_members`); comparing the two would then say nothing.
        roots_alone: Whether nobody could know the drafts of such a case, so that its roots are all there is to compare.
        unknown: Whether the trace does not tell what the drafts of such a case had to propose, and nothing judges them.
        bare: The steps of the case in which its draft was not asked: a session's `first`.
        setting: The setting in which the trace of the case was made: of its session, for a request of one.
        assumes_noise: Whether noise is taken at its a-priori size, without a control: for the requests of a session but
            the first, since their plain decode is no part of the session.
        variant_interval: Factor by which invariants that take turns are asked more seldom; the control is shorter by
            the same factor.
        forward_s: Seconds inside the backend's forwards so far, over every run.
        attention_calls: Calls of attention so far, one for each layer of each forward.
        fallbacks: Reasons why attention took a slower path, each with the number of calls.
        commits: Commits so far that asked for a faster way, by the way; `commit_fallbacks`: why some took another.
        notes: Results that invariants computed once for a case and share, by key.
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
        self.watch: Run | None = None
        self.share: Callable[[Case, bool], Trace | Refusal | Crash] | None = None
        self.abilities: Abilities | None = None
        self.declines: Callable[[Case], str | None] = lambda case: None
        self.variant_interval = 1
        self.tables_dtype = "float64"
        self.retold = False
        self.roots_alone = False
        self.unknown = False
        self.bare: frozenset[int] = frozenset()
        self.setting = ""
        self.assumes_noise = False
        self.forward_s = 0.0
        self.attention_calls = 0
        self.fallbacks: Counter[str] = Counter()
        self.commits: Counter[str] = Counter()
        self.commit_fallbacks: Counter[str] = Counter()
        self.runs = 0
        self.notes: OrderedDict[object, object] = OrderedDict()
        self._run = run
        self._keep = keep
        # The number tells repeated runs of one case apart; see `run_again`.
        self._memo = TraceMemory[Trace | Refusal | Crash](keep)
        self._asked_cases: dict[Case, None] | None = None

    @property
    def pace(self) -> Pace:
        """How often it is asked by the invariants that take turns."""
        shows_all = self.reveals == frozenset(Stage)
        return Pace(max(self.variant_interval, SHOWN_INTERVAL if shows_all else 1), shows_all)

    @property
    def logprobs(self) -> str:
        """The law of the log-probabilities in the case's own trace, one of `specverify.reference.abilities.LOGPROBS`.

        Other runs are of the plain setting, where `Abilities.logprobs` is their law.
        """
        return LOGPROBS[0] if self.abilities is None else self.abilities.logprobs_in(self.setting)

    def __call__(self, case: Case) -> Trace:
        """The backend's trace of `case`, run once and remembered.

        Raises:
            NoTrace: when the backend declined the case or its run broke.
        """
        return self._answer(case, 0)

    def outcome(self, case: Case) -> "Trace | Refusal | Crash":
        """The trace of `case`, or why there is none."""
        try:
            return self(case)
        except NoTrace as no_trace:
            return no_trace.outcome

    def remember_up_to(self, most_bytes: int) -> None:
        """Remember traces of so many bytes; see `TraceMemory.most_bytes`."""
        self._memo.most_bytes = most_bytes

    def remembered(self, case: Case) -> Trace | None:
        """The trace of `case` if it is remembered; nothing runs."""
        outcome = self._memo.get((case, 0))
        return outcome if isinstance(outcome, Trace) else None

    def remember(self, case: Case, trace: Trace) -> None:
        """Take `trace` as the answer to `case`; the subject that ran the case has counted its seconds and commits."""
        self._memo.put((case, 0), trace)

    def run_again(self, case: Case, time: int = 1) -> Trace:
        """The trace of a further run of `case` (`time` 1 for the second run, 2 for the third), remembered apart."""
        return self._answer(case, time)

    def run_watched(self, case: Case) -> Trace:
        """The trace of a further run of `case` with its random draws, remembered apart; see `watch`.

        Recording slows a run down, so that the runs of other questions go without it.
        """
        return self._answer(case, WATCHED)

    def run_variant(self, case: Case, extends: bool = False) -> Trace:
        """The trace of `case`, whose prefill is none of what is asked of it.

        On a checkpoint, and of a long prompt (LONG_PROMPT), the prompt is prefilled once for all such runs where the
        backend can (`share`); `extends` says that an earlier prompt may be the beginning of its own. Elsewhere this is
        a run as any other.
        """
        is_dear = isinstance(case.model, Checkpoint) or len(case.prompt) > LONG_PROMPT
        if self.share is None or not is_dear or self.remembered(case) is not None:
            return self(case)
        return self._answer(case, EXTENDED if extends else SHARED)

    def run_fresh(self, case: Case) -> "Trace | Refusal | Crash":
        """The outcome of one new run of `case`, neither remembered nor counted."""
        return self._run(case)

    def _answer(self, case: Case, time: int) -> Trace:
        key = (case, time)
        # Remembered answers are noted too: shrinking looks for the variant that is wrong by itself.
        if self._asked_cases is not None:
            self._asked_cases[case] = None
        outcome = self._memo.get(key)
        if outcome is None:
            outcome = self._ask(case, time)
            self.runs += 1
            if isinstance(outcome, Trace):
                self.forward_s += outcome.forward_s
                self.attention_calls += outcome.attention_calls
                self.fallbacks.update(outcome.fallbacks)
                commits, fallbacks = count_commits(case, outcome)
                self.commits.update(commits)
                self.commit_fallbacks.update(fallbacks)
            self._memo.put(key, outcome)
        if not isinstance(outcome, Trace):
            raise NoTrace(outcome)
        return outcome

    def _ask(self, case: Case, time: int) -> "Trace | Refusal | Crash":
        if time in (SHARED, EXTENDED):
            assert self.share is not None
            return self.share(case, time == EXTENDED)
        run = self.watch if time == WATCHED else self._run
        assert run is not None
        return run(case)

    @contextmanager
    def record_cases(self) -> Iterator[dict[Case, None]]:
        """The cases for which the subject is asked inside the `with`, in order, remembered ones included."""
        cases: dict[Case, None] = {}
        self._asked_cases = cases
        try:
            yield cases
        finally:
            self._asked_cases = None

    def compute_once(self, key: object, make: Callable[[], object]) -> object:
        """The result of `make()`, computed once for each key."""
        if key not in self.notes:
            self.notes[key] = make()
            while len(self.notes) > self._keep:
                self.notes.popitem(last=False)
        return self.notes[key]


def count_commits(case: Case, trace: Trace) -> tuple[Counter[str], Counter[str]]:
    """The commits of `trace` that asked for a way of FASTER, by way, and those that took another, by `way: reason`."""
    commits = Counter[str]()
    fallbacks = Counter[str]()
    way = case.layout.commit
    if way in FASTER:
        # In a session every request commits; the layout is one for all.
        for run in (trace,) if trace.shared is None else trace.shared.requests:
            records = [step.committed for step in run.steps if step.committed is not None] if run is not None else []
            commits[way] += len(records)
            fallbacks.update(f"{way}: {record.fallback}" for record in records if record.fallback is not None)
    return commits, fallbacks
