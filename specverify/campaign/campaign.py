"""The campaign: worker processes search, this process counts, records and reports; nothing finished is lost."""

import time
from dataclasses import dataclass, field
from typing import Protocol

from properties.same_cause import by_cause
from properties.shortfall import shortfalls
from properties.tally import Counts, Failure, Tally, condemned, nothing_fused
from properties.tie_count import too_many, vacuous
from properties.verdict.finding import Verdict
from reference.case import Case
from specverify.campaign.crew import Crew
from specverify.campaign.messages import ENOUGH, STOP, Began, Broken, Died, Done, Found, Located, Opened, Trouble
from specverify.interrupts import Interrupts
from specverify.plan import Plan
from specverify.setup.environment import environment

GRACE_S = 15.0
"""Seconds that workers get to finish their cases after an interrupt."""

TICK_S = 0.2
"""Seconds between two looks at interrupts."""

REPLACEMENTS = 3
"""Times that one worker's place is filled anew."""


class Listener(Protocol):
    """Who records a campaign as it goes."""

    def opened(self, news: Opened) -> None:
        """The first worker's backend is open."""

    def arrived(self, verdict: Verdict) -> str | None:
        """A case was judged; returns why the verdict could not be recorded, or None."""

    def found(self, failure: Failure, before: Failure | None) -> tuple[Failure, str | None]:
        """A failure was found, or, with `before`, takes the place of what was told of it before.

        Returns the failure with the file that holds it, and why there is none, if there is none.
        """

    def lost(self, case: Case) -> str | None:
        """A worker died at `case`, which is saved; returns the file's path, or None."""


@dataclass
class _Place:
    """The campaign's record of one worker's place.

    Attributes:
        at: The case that is being judged there, or None.
        judged: Ids of the cases judged there, or given up.
        failures: Failures located there; the last may still be as it was drawn.
        provisional: Whether the last of `failures` is still being made smaller.
        deaths: Workers that died there.
    """

    at: Case | None = None
    judged: set[str] = field(default_factory=set)
    failures: list[Failure] = field(default_factory=list)
    provisional: bool = False
    deaths: int = 0
    over: bool = False
    exhausted: bool = False


def run(plan: Plan, listener: Listener) -> tuple[Tally, int | None]:
    """Run `plan` in its worker processes; the tally, and the exit code that a broken start asks for, or None."""
    campaign = Campaign(plan, listener)
    campaign.run()
    return campaign.tally, campaign.code


class Campaign:
    """One run of a plan.

    Attributes:
        tally: What it came to so far.
        code: The exit code that a broken start asks for, or None.
    """

    def __init__(self, plan: Plan, listener: Listener) -> None:
        self._plan = plan
        self._listener = listener
        self._places = [_Place() for _ in range(plan.jobs)]
        self._enough = False
        self._stopping = False
        self.code: int | None = None
        ran = {**environment(), "seed": str(plan.seed), "jobs": str(plan.jobs)}
        self.tally = Tally(plan.backend, environment=ran, against=plan.against)
        self.tally.wanted = plan.cases

    def run(self) -> None:
        """Until every worker has come to its end, or an interrupt's grace is over."""
        began = time.monotonic()
        deadline = began + self._plan.time_budget_s if self._plan.time_budget_s else float("inf")
        with Interrupts() as interrupts:
            self._crew = Crew(self._plan, deadline)
            try:
                while not all(place.over for place in self._places):
                    for at, message in self._crew.news(TICK_S):
                        self._hear(at, message)
                    if interrupts.word and not self._stopping:
                        self._stop()
                    if interrupts.word and time.monotonic() - interrupts.at > GRACE_S:
                        break
            finally:
                self._crew.end()
        self._conclude(interrupts.word, time.monotonic() > deadline)
        self.tally.seconds = time.monotonic() - began

    def _hear(self, at: int, message: object) -> None:
        place = self._places[at]
        if isinstance(message, Opened):
            self._opened(message)
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
        """Distinct causes among the failures so far."""
        return len(by_cause([one for place in self._places for one in place.failures]))

    def _stop(self) -> None:
        self._stopping = True
        self._crew.tell(STOP)

    def _trouble(self, why: str | None) -> None:
        if why is not None and why not in self.tally.errors:
            self.tally.errors.append(why)

    def _opened(self, news: Opened) -> None:
        tally = self.tally
        tally.environment |= news.environment
        if tally.opened:
            return
        tally.opened = True
        tally.backend, tally.emulated, tally.declared = news.name, news.emulated, news.reveals
        tally.invariants = {name: Counts() for name in news.invariants} | tally.invariants
        tally.wanted = news.wanted if self._plan.model is not None else self._plan.cases
        self._listener.opened(news)

    def _located(self, place: _Place, message: Found | Located) -> None:
        """Save a failure at once; its smaller form takes the place of what was saved."""
        before = place.failures.pop() if isinstance(message, Located) and place.provisional else None
        saved, why = self._listener.found(message.failure, before)
        self._trouble(why)
        place.failures.append(saved)
        place.provisional = isinstance(message, Found)
        if isinstance(message, Located):
            self.tally.shrink_seconds = max(self.tally.shrink_seconds, message.shrink_s)

    def _bury(self, at: int, place: _Place, how: str) -> None:
        """A worker died: name its case, and put another in its place unless what it left can be told as it is."""
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
        if case is not None and place.deaths > 1 and case.id not in place.judged:
            place.judged.add(case.id)
            kept = self._listener.lost(case)
            saved = f" (saved as {kept})" if kept else ""
            self._trouble(f"case {case.id}{saved} was given up: worker {at} died at it ({how}), as one before it did")
        self.tally.replaced += 1
        place.at = None
        self._crew.replace(at, frozenset(place.judged))
        if self._enough:
            self._crew.tell(ENOUGH)

    def _conclude(self, interrupted: str | None, late: bool) -> None:
        """Say what only the whole run shows: why it ended early, what it left out, ties and samples beyond chance."""
        tally = self.tally
        tally.failures = by_cause([one for place in self._places for one in place.failures])
        tally.excess_ties = too_many(tally) or tally.excess_ties
        tally.excess_evidence = condemned(tally)
        if interrupted is not None:
            tally.stopped = f"interrupted ({interrupted})"
            tally.errors.append(f"interrupted after {tally.cases} cases: what did not run is not a pass")
        elif tally.failures and self._enough and tally.cases < tally.wanted:
            more = "" if self._plan.max_failures > 1 else "first "
            tally.stopped = f"at the {more}failure; --keep-going judges the rest"
        elif late and tally.cases < tally.wanted:
            tally.stopped = f"time budget of {self._plan.time_budget_s:g} s used up"
        elif all(place.exhausted for place in self._places) and tally.cases < tally.wanted:
            tally.stopped = "there are no more cases to draw"
        spoken = [vacuous(tally), nothing_fused(tally)]
        if not tally.failures and self.code is None and interrupted is None:
            spoken += shortfalls(tally)
        tally.errors += [why for why in spoken if why is not None]
