"""The campaign: the process that counts, records and reports a run.

Worker processes search. Each verdict and each failure is recorded when it arrives, so that a crash or an interrupt
loses nothing that was finished.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from properties.same_cause import by_cause
from properties.shortfall import shortfalls
from properties.streams import Expected
from properties.tally import Counts, Failure, Tally, condemned, nothing_fused
from properties.tie_count import too_many, vacuous
from properties.verdict.finding import Verdict
from reference.case import Case
from specverify.campaign.crew import Crew
from specverify.campaign.messages import (
    ENOUGH,
    STOP,
    Began,
    Broken,
    Died,
    Done,
    Ended,
    Estimated,
    Found,
    Located,
    Opened,
    Passed,
    Trouble,
)
from specverify.interrupts import Interrupts
from specverify.plan import Plan
from specverify.setup.environment import environment

GRACE_S = 15.0
"""Seconds after an interrupt in which workers may finish their cases."""

TICK_S = 0.2
"""Longest time, in seconds, between two checks for an interrupt."""

REPLACEMENTS = 3
"""Most workers that replace a dead worker in one place."""


class Listener(Protocol):
    """The interface of an object that records a campaign while it runs."""

    def opened(self, told: Opened) -> None:
        """The first worker's backend is open."""

    def estimated(self, line: str) -> None:
        """The first steps of a run on a checkpoint were timed; `line` tells how long the run will take."""

    def arrived(self, verdict: Verdict) -> str | None:
        """A case was judged; return the reason if the verdict could not be recorded, else None."""

    def found(self, failure: Failure, before: Failure | None) -> tuple[Failure, str | None]:
        """A failure was found; with `before`, it is the shrunk form of the failure `before` and replaces that.

        Returns the failure with the name of its file, and the reason if no file could be written.
        """

    def waited(self) -> None:
        """No message came for a moment."""

    def heard(self, place: int, message: object) -> None:
        """A message came from the worker at `place`, or the campaign itself has `Ended`, at place 0."""

    def lost(self, case: Case) -> str | None:
        """A worker died at `case`; save the case, and return the file's path, or None if it could not be saved."""


@dataclass
class _Place:
    """The campaign's record of one worker's place, which a replacement inherits.

    Attributes:
        at: The case that the worker is judging, or None.
        judged: Ids of the cases that were judged in this place, or given up.
        failures: Failures found in this place; the last one may still be as drawn.
        provisional: Whether the last of `failures` is still being shrunk.
        deaths: Number of workers that died in this place.
        over: Whether the place has come to its end.
        exhausted: Whether there were no more new cases to draw.
    """

    at: Case | None = None
    judged: set[str] = field(default_factory=set)
    failures: list[Failure] = field(default_factory=list)
    provisional: bool = False
    deaths: int = 0
    over: bool = False
    exhausted: bool = False


def run(plan: Plan, listener: Listener) -> tuple[Tally, int | None]:
    """Run `plan` in worker processes; return the tally, and the exit code if a start failed, else None."""
    campaign = Campaign(plan, listener)
    campaign.run()
    return campaign.tally, campaign.code


class Campaign:
    """One run of a plan.

    Attributes:
        tally: The counts so far.
        code: The exit code if a worker could not start or was lost, else None.
    """

    def __init__(self, plan: Plan, listener: Listener) -> None:
        self._plan = plan
        self._listener = listener
        # A place outlives its workers: a replacement continues its record.
        self._places = [_Place() for _ in range(plan.jobs)]
        self._enough = False
        self._stopping = False
        self.code: int | None = None
        self._sampling: Expected | None = None
        ran = {**environment(), "seed": str(plan.seed), "jobs": str(plan.jobs)}
        self.tally = Tally(plan.backend, environment=ran, against=plan.against)
        self.tally.wanted = plan.drawn_and_saved

    def run(self) -> None:
        """Run until every worker has come to its end, or until the grace time after an interrupt is over."""
        began = time.monotonic()
        deadline = began + self._plan.time_budget_s if self._plan.time_budget_s else float("inf")
        with Interrupts() as interrupts:
            # Inside `Interrupts`, so that a signal during the start of workers is noted.
            self._crew = Crew(self._plan, deadline)
            try:
                while not all(place.over for place in self._places):
                    for at, message in self._crew.messages(TICK_S):
                        self._hear(at, message)
                    self._listener.waited()
                    if interrupts.word and not self._stopping:
                        self._stop()
                    if interrupts.word and time.monotonic() - interrupts.at > GRACE_S:
                        break
            finally:
                self._crew.end()
        exhausted = all(place.exhausted for place in self._places)
        self._conclude(self._ended(time.monotonic() - began, interrupts.word, time.monotonic() > deadline, exhausted))

    def retell(self, told: Iterable[tuple[int, object]], ended: Ended) -> None:
        """Take the messages of runs that are over, in place of workers'; `ended` is the end of all of them."""
        for at, message in told:
            self._hear(at, message)
        tally = self.tally
        self.code, tally.replaced, tally.wanted = ended.code, ended.replaced, ended.wanted
        if self._sampling is not None:
            tally.planned = self._sampling.over(ended.wanted)
        tally.errors = [*dict.fromkeys((*tally.errors, *ended.errors))]
        self._conclude(self._ended(ended.seconds, ended.interrupted, ended.late, ended.exhausted))

    def _ended(self, seconds: float, interrupted: str | None, late: bool, exhausted: bool) -> Ended:
        tally = self.tally
        return Ended(
            seconds, tally.wanted, tuple(tally.errors), self.code, tally.replaced, interrupted, late, exhausted
        )

    def _hear(self, at: int, message: object) -> None:
        self._listener.heard(at, message)
        place = self._places[at]
        if isinstance(message, Opened):
            self._opened(message)
        elif isinstance(message, Estimated):
            self._listener.estimated(message.line)
        elif isinstance(message, Began):
            place.at = message.case
        elif isinstance(message, Verdict):
            place.at = None
            place.judged.add(message.case.id)
            self.tally.add(message)
            self._trouble(self._listener.arrived(message))
        elif isinstance(message, (Found, Located)):
            self._located(place, message)
            if self._found >= self._plan.max_failures and not self._enough:
                self._enough = True
                self._crew.tell(ENOUGH)
        elif isinstance(message, Passed):
            self.tally.wanted -= message.case not in self.tally.passed
            self.tally.passed[message.case] = message.why
        elif isinstance(message, Trouble):
            self._trouble(message.why)
        elif isinstance(message, Done):
            place.over, place.exhausted = True, message.exhausted
        elif isinstance(message, Broken):
            place.over = True
            self._trouble(message.why)
            self.code = self.code if self.code is not None else message.code
            if self.code == 2:
                self._stop()  # what is wrong with the input is wrong for every worker
        elif isinstance(message, Died) and not place.over:
            self._bury(at, place, message.how)

    @property
    def _found(self) -> int:
        """The number of distinct causes among the failures so far."""
        return len(by_cause([one for place in self._places for one in place.failures]))

    def _stop(self) -> None:
        self._stopping = True
        self._crew.tell(STOP)

    def _trouble(self, why: str | None) -> None:
        if why is not None and why not in self.tally.errors:
            self.tally.errors.append(why)

    def _opened(self, told: Opened) -> None:
        tally = self.tally
        tally.environment |= told.environment
        if tally.opened:
            return
        tally.opened = True
        tally.backend, tally.emulated, tally.declared = told.name, told.emulated, told.reveals
        # Invariants that no verdict names must appear too; counts that have arrived are kept.
        tally.invariants = {name: Counts() for name in told.invariants} | tally.invariants
        tally.wanted = told.wanted if self._plan.model is not None else self._plan.drawn_and_saved - len(tally.passed)
        tally.tokens_alone = told.tokens_alone
        self._sampling = told.sampling
        tally.planned = None if told.sampling is None else told.sampling.over(tally.wanted)
        self._listener.opened(told)

    def _located(self, place: _Place, message: Found | Located) -> None:
        """Save a failure at once; its shrunk form later replaces the saved one."""
        before = place.failures.pop() if isinstance(message, Located) and place.provisional else None
        saved, why = self._listener.found(message.failure, before)
        self._trouble(why)
        place.failures.append(saved)
        place.provisional = isinstance(message, Found)
        if isinstance(message, Located):
            self.tally.shrink_seconds = max(self.tally.shrink_seconds, message.shrink_s)

    def _bury(self, at: int, place: _Place, how: str) -> None:
        """A worker died: report its case, and start a replacement.

        There is none if the worker was shrinking (the failure is reported as drawn), at the end of a run, or after
        too many deaths.
        """
        case, place.deaths = place.at, place.deaths + 1
        where = "" if case is None else f" at case {case.id}"
        if place.provisional:
            place.over = True
            self._trouble(f"worker {at} died ({how}) while it made a failure smaller: the failure is told as it was")
            return
        if self._stopping or place.deaths > REPLACEMENTS:
            place.over = True
            kept = None if case is None else self._listener.lost(case)
            saved = f", saved as {kept}" if kept else ""
            self._trouble(f"worker {at} died ({how}){where}{saved}; its other cases were not judged")
            self.code = 3 if self.code is None else self.code
            return
        # From the second death in this place on, the current case is given up; the first may have had another cause.
        if case is not None and place.deaths > 1 and case.id not in place.judged:
            place.judged.add(case.id)
            kept = self._listener.lost(case)
            saved = f" (saved as {kept})" if kept else ""
            self._trouble(f"case {case.id}{saved} was given up: worker {at} died at it ({how}), as one before it did")
        self.tally.replaced += 1
        place.at = None
        self._crew.replace(at, frozenset(place.judged))
        # The replacement has not heard the order that its predecessor got.
        if self._enough:
            self._crew.tell(ENOUGH)

    def _conclude(self, ended: Ended) -> None:
        """Add the facts that only a whole run shows: an early end, gaps, and ties or samples beyond chance."""
        self._listener.heard(0, ended)
        tally, interrupted = self.tally, ended.interrupted
        tally.seconds = ended.seconds
        tally.failures = by_cause([one for place in self._places for one in place.failures])
        tally.excess_ties = too_many(tally) or tally.excess_ties
        tally.excess_evidence = condemned(tally)
        if interrupted is not None:
            tally.stopped = f"interrupted ({interrupted})"
            tally.errors.append(f"interrupted after {tally.cases} cases: what did not run is not a pass")
        elif tally.failures and self._enough and tally.cases < tally.wanted:
            more = "" if self._plan.max_failures > 1 else "first "
            tally.stopped = f"at the {more}failure; --keep-going judges the rest"
        elif ended.late and tally.cases < tally.wanted:
            tally.stopped = f"time budget of {self._plan.time_budget_s:g} s used up"
        elif ended.exhausted and tally.cases < tally.wanted:
            tally.stopped = "there are no more cases to draw"
        spoken = [vacuous(tally), nothing_fused(tally)]
        # Gaps count only in a run that would otherwise pass.
        if not tally.failures and self.code is None and interrupted is None:
            spoken += shortfalls(tally)
        tally.errors += [why for why in spoken if why is not None]
