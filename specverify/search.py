"""The loop of one worker: draw cases, judge them, and make the first that differs as small as it gets."""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from hypothesis.errors import Flaky

from properties.exploring import SEARCHING, explore
from properties.finding import TARGET_ALONE, Finding, Verdict, of_draft_numbers, of_target_alone
from properties.invariant import Invariant, Oracle, taking_turns
from properties.judge import judge
from properties.strategies import cases
from properties.strategies.smaller import STEPS, Steps, apart, attempts, nearer, size
from properties.strategies.without_draft import without_draft
from properties.subject import Subject
from properties.tally import Failure
from reference.case import Case
from reference.trace import Stage
from specverify.plan import Plan

Emit = Callable[[Verdict], None]

ROUND = 6
"""Cases that Hypothesis draws from one seed. Later in a round it draws like what it drew before: with 6 instead of 100,
sessions come three times as often, rare conditions in half as many cases, and drawing takes two thirds of the time."""

BARREN = 8
"""Rounds without a new case after which a search ends: there are no more."""


def round_seed(number: int, rounds: int) -> int:
    """The seed of a search's round after `rounds` others."""
    return number + 1_000_003 * rounds


class Enough(BaseException):
    """Ends a Hypothesis run from inside; no Exception, so that Hypothesis does not take it for a failing case."""


class Differs(Exception):
    """Tells Hypothesis that a case fails."""


@dataclass
class Search:
    """One worker's search.

    Attributes:
        plan: Its slice of the plan.
        invariants: What to check.
        oracle: The truth.
        subject: The backend.
        emit: Called with each judged verdict, as it arrives.
        stopped: Whether someone asked to stop.
        halted: Whether someone asked to end the shrinking of what was found, too; None where `stopped` says both.
        began: Called with each case before it is judged.
        found: Called with a failure as it was drawn, before any of the work of making it smaller.
        exhausted: Whether the search ended because there were no more new cases.
    """

    plan: Plan
    invariants: tuple[Invariant, ...]
    oracle: Oracle
    subject: Subject
    emit: Emit
    stopped: Callable[[], bool]
    halted: Callable[[], bool] | None = None
    began: Callable[[Case], None] = lambda case: None
    found: Callable[[Failure], None] = lambda failure: None
    shrink_s: float = 0.0
    exhausted: bool = False
    _first: Verdict | None = None
    _best: Verdict | None = None
    _located: Finding | None = None
    _tried: int = 0
    _found_at: float = 0.0
    _until: float = field(default=float("inf"))
    _agreed: Case | None = None
    _error: Exception | None = None
    _seen: set[str] = field(default_factory=set)
    _judged: set[str] = field(default_factory=set)
    _known: set[tuple[str, Stage]] = field(default_factory=set)
    _rounds: int = 0

    def passed(self, judged: Iterable[str]) -> None:
        """Leave out the cases of these ids: another process judged them in this one's place."""
        self._judged |= set(judged)

    def go_on(self, told: Failure) -> None:
        """Search on after the failure `told`; what fails like it, or like its case as drawn, is not told again."""
        drawn = self._first.first if self._first is not None else None
        self._known |= {(one.invariant, one.stage) for one in (told.finding, drawn, self._located) if one is not None}
        self._first = self._best = self._located = self._agreed = None
        self._tried = 0
        self._until = float("inf")

    def run(self) -> None:
        """Draw the plan's cases; keep the first difference and let Hypothesis shrink it."""
        barren = 0
        # Every round begins with the plainest case; a case counts once.
        while len(self._seen) < self.plan.cases and barren < BARREN and self._first is None and not self.stopped():
            before = len(self._seen)
            drawn = cases(self.plan.dtypes, self.plan.processors, self.plan.layout, self.subject.rarely)
            with suppress(Enough, Differs, Flaky):  # what was found is in _first and _best
                explore(round_seed(self.plan.seed, self._rounds), ROUND, drawn, self._try, SEARCHING)
            if self._error is not None:
                raise self._error
            self._rounds, barren = self._rounds + 1, 0 if len(self._seen) > before else barren + 1
        self.exhausted = barren >= BARREN

    def run_given(self, given_cases: Iterable[tuple[Case, tuple[Invariant, ...]]]) -> None:
        """Judge cases that were made, not drawn, each by its own invariants; stop at the first difference."""
        for case, invariants in given_cases:
            if case.id in self._judged:
                continue
            if self.stopped():
                break
            self.began(case)
            verdict = judge(case, invariants, self.oracle, self.subject)
            self.emit(verdict)
            if self._is_new(verdict):
                self._found(verdict)
                break

    @property
    def smallest(self) -> Case | None:
        """The smallest case so far that differs."""
        return None if self._best is None else self._best.case

    @property
    def differs(self) -> bool:
        """Whether a difference was met."""
        return self._first is not None

    def _try(self, case: Case) -> None:
        """What Hypothesis calls; an error of our own ends the search at once and never passes for a failing case."""
        try:
            self._judge(case)
        except (Enough, Differs):
            raise
        except Exception as error:
            self._error = error
            raise Enough from error

    def _judge(self, case: Case) -> None:
        if self._first is None:
            if self.stopped():
                raise Enough
            if case.id in self._seen:
                return
            self._seen.add(case.id)
            if case.id not in self._judged:
                self.began(case)
                turns = taking_turns(case, self.invariants, self.subject.rarely)
                verdict = judge(case, turns, self.oracle, self.subject)
                self.emit(verdict)
            if case.id in self._judged or not self._is_new(verdict):
                if len(self._seen) == self.plan.cases:
                    raise Enough
                return
            self._found(verdict)
            raise Differs
        if self._out_of_time():
            raise Enough
        if self._fails_alike(case) is not None:
            raise Differs

    def _is_new(self, verdict: Verdict) -> bool:
        """Whether a verdict differs in a way that was not told before."""
        located = verdict.first
        return located is not None and (located.invariant, located.stage) not in self._known

    def _found(self, verdict: Verdict) -> None:
        """Remember the first difference; Hypothesis gets three fifths of the time for shrinking it."""
        self._first = self._best = verdict
        self._found_at = time.monotonic()
        self._until = self._found_at + 0.6 * self.plan.shrink_s
        self.found(self.as_drawn())
        self._best = self._blamed_on_target(verdict) or verdict
        self._located = self._best.first

    def _halted(self) -> bool:
        return (self.stopped if self.halted is None else self.halted)()

    def _out_of_time(self) -> bool:
        """Whether the shrinking is over."""
        return time.monotonic() > self._until or self._halted()

    def _blamed_on_target(self, verdict: Verdict) -> Verdict | None:
        """Where a model draft computes wrong numbers: a case without one on which the target alone is wrong, or None.

        Draft and target share attention, KV caches and masks. The target is asked first for the trees that the draft
        proposed, then the draft's own model in the target's place: if one of them fails, what they share is at fault.
        """
        drifted = next((finding for finding in verdict.findings if of_draft_numbers(finding)), None)
        if drifted is None or verdict.trace is None:
            return None
        asked = tuple(one for one in self.invariants if one.name in TARGET_ALONE)
        request = int(drifted.where.get("request", 0))
        for case in without_draft(verdict.case, verdict.trace, request, drifted.step):
            if self._out_of_time():
                return None
            self._tried += 1
            judged = judge(case, asked, self.oracle, self.subject)
            if judged.first is not None and of_target_alone(judged.first):
                return judged
        return None

    def _fails_alike(self, case: Case) -> Verdict | None:
        """The verdict of `case` if the same invariant differs at the same stage; remembered if it is the smallest."""
        assert self._best is not None
        located = self._located
        assert located is not None
        self._tried += 1
        verdict = judge(case, self._concerned(located), self.oracle, self.subject)
        found = verdict.first
        if found is None or (found.invariant, found.stage) != (located.invariant, located.stage):
            self._passed(verdict)
            return None
        if size(case) < size(self._best.case):
            self._best, self._agreed = verdict, None
        return verdict

    def _passed(self, verdict: Verdict) -> None:
        """Remember a case that agrees if it is nearer to the smallest that differs than the one remembered."""
        assert self._best is not None
        if not (verdict.agreed and "checked" in verdict.outcomes.values()):
            return
        best = self._best.case
        if self._agreed is None or apart(verdict.case, best) < apart(self._agreed, best):
            self._agreed = verdict.case

    def _concerned(self, located: Finding) -> tuple[Invariant, ...]:
        """The invariants that shrinking asks: the one that located the difference."""
        return tuple(one for one in self.invariants if one.name == located.invariant)

    def as_drawn(self) -> Failure:
        """The difference found, on the case as it was drawn: what is told at once."""
        assert self._first is not None
        located = self._first.first
        assert located is not None
        return self._failure(self._first, located)

    def _failure(self, verdict: Verdict, finding: Finding, nearest: Case | None = None) -> Failure:
        assert self._first is not None
        return Failure(
            verdict=verdict,
            finding=finding,
            drawn=self._first.case.id,
            tried=self._tried,
            nearest=nearest,
            fault=self.plan.fault,
            backend=self.plan.backend,
            model=self.plan.model,
            against=self.plan.against,
        )

    def failure(self, search_nearest: bool = True) -> Failure | None:
        """The difference found: its smallest case judged by every invariant, and the nearest case that agrees.

        Where shrinking met no case that agrees, one is looked for apart, unless `search_nearest` says not to.
        """
        if self._first is None or self._best is None:
            return None
        self._until = self._found_at + self.plan.shrink_s
        self._reduce()
        whole = judge(self._best.case, self.invariants, self.oracle, self.subject)
        if whole.first is None:
            # Only the narrowed judgement fails: report what was seen, on the case as it was drawn.
            whole = self._first
        whole = self._shown_by_itself(whole)
        finding = whole.first
        assert finding is not None
        nearest = self._agreed if whole.case == self._best.case else None
        if nearest is None and search_nearest:
            nearest = self._agreeing(whole.case, finding)
        self.shrink_s = time.monotonic() - self._found_at
        return self._failure(whole, finding, nearest)

    def _shown_by_itself(self, whole: Verdict) -> Verdict:
        """The verdict on a variant of the case that differs by itself, at no later stage and with no more nodes.

        An invariant that compares the runs of variants can only say where two of them part. Judged as a case of its
        own, the one that is wrong is located as any other, and needs nothing beside it to be replayed.
        """
        located = whole.first
        assert located is not None
        looking = tuple(one for one in self.invariants if one.looks_at_run)
        if any(one.name == located.invariant for one in looking):
            return whole
        with self.subject.asked() as asked:
            judge(whole.case, self._concerned(located), self.oracle, self.subject)
        for variant in asked:
            if variant == whole.case or size(variant)[0] > size(whole.case)[0]:
                continue
            found = judge(variant, looking, self.oracle, self.subject).first
            if found is not None and found.stage <= located.stage:
                return judge(variant, self.invariants, self.oracle, self.subject)
        return whole

    def _reduce(self) -> None:
        """Greedy steps to smaller cases, on the case itself, until none of them still differs.

        A kind of step is taken as long as it leads on, and the next kind begins where it ended: prompts and budgets
        that are short make every later try cheap.
        """
        progress: bool = True
        while progress:
            progress = False
            for steps in STEPS:
                while led := self._step(steps):
                    progress = True
                if led is None:
                    return

    def _step(self, steps: Steps) -> bool | None:
        """Whether one of `steps` leads from the smallest case so far to a smaller one; None when time is over."""
        assert self._best is not None
        for smaller in attempts(steps, self._best.case):
            if self._out_of_time():
                return None
            if size(smaller) < size(self._best.case) and self._fails_alike(smaller) is not None:
                return True
        return False

    def _agreeing(self, case: Case, located: Finding) -> Case | None:
        """The nearest smaller or plainer case on which the invariant holds."""
        deadline = time.monotonic() + 0.25 * self.plan.shrink_s
        for other in nearer(case):
            if time.monotonic() > deadline or self._halted():
                return None
            verdict = judge(other, self._concerned(located), self.oracle, self.subject)
            if verdict.agreed and "checked" in verdict.outcomes.values():
                return other
        return None


def stripped(verdict: Verdict) -> Verdict:
    """The verdict without its trace, as workers send it."""
    return replace(verdict, trace=None)
