"""The campaign: the process that counts, records and reports a run.

Worker processes search. Each verdict and each failure is recorded when it arrives, so that a crash or an interrupt
loses nothing that was finished.
"""

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Protocol

from specverify.backends.flags import Mode
from specverify.backends.shipped import ROWS
from specverify.campaign.crew import AnyCrew, Crew, Place
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
    event_of,
)
from specverify.interrupts import Interrupts
from specverify.plan import Plan
from specverify.properties.residue import Residue
from specverify.properties.run_statistics import excess_choices, excess_error, excess_ties, undecided_comparison
from specverify.properties.same_cause import by_cause
from specverify.properties.shortfall import shortfalls
from specverify.properties.streams import ExpectedDraws
from specverify.properties.tally import Counts, Failure, Tally, excess_evidence, nothing_fused
from specverify.properties.verdict.coverage.pair_coverage import PairCoverage, possible_pairs
from specverify.properties.verdict.finding import Verdict
from specverify.reference.case import Case

GRACE_S = 15.0
"""Seconds after an interrupt in which workers may finish their cases."""

TICK_S = 0.2
"""Longest time, in seconds, between two checks for an interrupt."""

REPLACEMENTS = 3
"""Most workers that replace a dead worker in one place."""


class Listener(Protocol):
    """The interface of an object that records a campaign while it runs."""

    def backend_opened(self, message: Opened) -> None:
        """The first worker's backend is open."""

    def time_estimated(self, line: str) -> None:
        """A run on a checkpoint begins; `line` tells how long it will take, or how much memory."""

    def verdict_arrived(self, verdict: Verdict) -> str | None:
        """A case was judged; return the reason if the verdict could not be recorded, else None."""

    def failure_found(self, failure: Failure, before: Failure | None) -> tuple[Failure, str | None]:
        """A failure was found; with `before`, it is the shrunk form of the failure `before` and replaces that.

        Returns the failure with the name of its file, and the reason if no file could be written.
        """

    def messages_recalled(self) -> None:
        """Mark the cases so far as those of an earlier run; the cases that follow are new."""

    def tick_passed(self) -> None:
        """No message came for a moment."""

    def message_heard(self, place: int, message: object) -> str | None:
        """A message came from the worker at `place`, or the campaign itself has `Ended`, at place 0.

        Returns the reason if it could not be recorded, else None.
        """

    def judge_raised(self, failure: Failure) -> tuple[Failure, str | None]:
        """The judge raised on a case; save it as `failure_found` does."""

    def worker_lost(self, case: Case) -> str | None:
        """A worker died at `case`; save the case, and return the file's path, or None if it could not be saved."""


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
        self.plan = plan
        self.listener = listener
        # A place outlives its workers: a replacement continues its record.
        self.places = [Place() for _ in range(plan.jobs)]
        self._enough = False
        self.stopping = False
        self.crew: AnyCrew | None = None  # a run that is only told again has none
        self.code: int | None = None
        self._sampling: ExpectedDraws | None = None
        self.tally = Tally(plan.backend, environment=plan.environment, against=plan.against, reference=plan.reference)
        self.tally.wanted = plan.drawn_and_saved
        self.tally.open_ended = plan.open_ended

    def run(self) -> None:
        """Run until every worker has come to its end, or until the grace time after an interrupt is over."""
        began = time.monotonic()
        deadline = began + self.plan.time_budget_s if self.plan.time_budget_s else float("inf")
        with Interrupts() as interrupts:
            # Inside `Interrupts`, so that a signal during the start of workers is noted.
            self.crew = crew = self.start_crew(deadline)
            try:
                while not all(place.over for place in self.places):
                    for number, message in crew.messages(TICK_S):
                        self.trouble(self.listener.message_heard(number, message))
                        self.hear(number, message)
                    self.listener.tick_passed()
                    if interrupts.word and not self.stopping:
                        self._stop()
                    if interrupts.word and time.monotonic() - interrupts.time_s > GRACE_S:
                        break
            finally:
                crew.end()
        exhausted = all(place.exhausted for place in self.places)
        ended = self._ended(time.monotonic() - began, interrupts.word, time.monotonic() > deadline, exhausted)
        self.trouble(self.listener.message_heard(0, ended))
        self._conclude(ended)

    def recall(self, messages: Iterable[tuple[int, object]]) -> None:
        """Take messages of an earlier run before this one goes on."""
        for number, message in messages:
            self.hear(number, message)
        self.listener.messages_recalled()

    def absorb(self, part: Tally, met: int, cases: Iterable[Case]) -> None:
        """Count the cases of a part of the run, in place of its verdicts; see `Tally.absorb`."""
        self.tally.absorb(part, met, cases)
        self._save_internal()

    def conclude(self, ended: Ended) -> None:
        """End a run whose messages were heard in place of workers'; `ended` is the end of all its parts."""
        self.listener.messages_recalled()
        tally = self.tally
        self.code = ended.code
        tally.replaced = ended.replaced
        tally.wanted = ended.wanted
        if self._sampling is not None:
            tally.planned = self._sampling.over(ended.wanted)
        tally.errors = [*dict.fromkeys((*tally.errors, *ended.errors))]
        self._conclude(self._ended(ended.seconds, ended.interrupted, ended.late, ended.exhausted))

    def _ended(self, seconds: float, interrupted: str | None, late: bool, exhausted: bool) -> Ended:
        tally = self.tally
        return Ended(
            seconds, tally.wanted, tuple(tally.errors), self.code, tally.replaced, interrupted, late, exhausted
        )

    def start_crew(self, deadline: float) -> AnyCrew:
        """The crew that judges the plan; its workers begin no case after `deadline` on the monotonic clock."""
        return Crew(self.plan, deadline)

    def hear(self, number: int, message: object) -> None:
        """Take a message of the worker at place `number`."""
        place = self.places[number]
        self.tally.log.note(number, event_of(message))
        if isinstance(message, Opened):
            self._take_opened(message)
        elif isinstance(message, Estimated):
            self.listener.time_estimated(message.line)
        elif isinstance(message, Began):
            place.case = message.case
        elif isinstance(message, Verdict):
            place.case = None
            place.judged[message.case.id] += 1
            self.tally.add(message)
            self.trouble(self.listener.verdict_arrived(message))
            if message.internal:
                self._save_internal()
        elif isinstance(message, (Found, Located)):
            self._save_failure(place, message)
            if self._num_causes >= self.plan.max_failures and not self._enough:
                self._enough = True
                self._tell_crew(ENOUGH)
        elif isinstance(message, Passed):
            self.tally.wanted -= message.case not in self.tally.passed
            self.tally.passed[message.case] = message.why
        elif isinstance(message, Trouble):
            self.trouble(message.why)
        elif isinstance(message, Residue):
            self.tally.residue.setdefault(message.kind, message)
        elif isinstance(message, Done):
            place.over = True
            place.exhausted = message.exhausted
        elif isinstance(message, Broken):
            place.over = True
            self.trouble(message.why)
            self.code = self.code if self.code is not None else message.code
            if self.code == 2:
                self._stop()  # what is wrong with the input is wrong for every worker
        elif isinstance(message, Died) and not place.over:
            self.bury(number, place, message.how)

    def _save_internal(self) -> None:
        """Save the first case of every exception inside the judge that has no file yet."""
        plan = self.plan
        origin: dict[str, Any] = {
            "fault": plan.fault, "backend": plan.backend, "model": plan.model, "against": plan.against,
        }  # fmt: skip
        for error in self.tally.internal:
            if error.saved is None:
                error.saved, why = self.listener.judge_raised(replace(error.as_failure(), **origin))
                self.trouble(why)

    @property
    def _num_causes(self) -> int:
        """The number of distinct causes among the failures so far."""
        return len(by_cause([failure for place in self.places for failure in place.failures]))

    def _stop(self) -> None:
        self.stopping = True
        self._tell_crew(STOP)

    def _tell_crew(self, order: str) -> None:
        if self.crew is not None:
            self.crew.tell(order)

    def trouble(self, why: str | None) -> None:
        """Add a reason why the run cannot judge, once; None is no reason."""
        if why is not None and why not in self.tally.errors:
            self.tally.errors.append(why)

    def _take_opened(self, message: Opened) -> None:
        tally = self.tally
        tally.environment |= message.environment
        if tally.opened:
            return
        tally.opened = True
        tally.backend = message.name
        tally.emulated = message.emulated
        tally.excluded = message.excluded
        tally.varied = message.varied
        tally.declared = message.reveals
        tally.pairs = None if message.labels is None else PairCoverage(possible_pairs(message.labels))
        row = next((row for row in ROWS if row.name == self.plan.backend), None)
        tally.has_kernel = row is not None and row.own_kernel
        tally.own_kernel = tally.has_kernel and message.environment.get("mode") == Mode().word
        # Invariants that no verdict names must appear too; counts that have arrived are kept.
        tally.invariants = {name: Counts() for name in message.invariants} | tally.invariants
        tally.wanted = message.wanted if self.plan.model is not None else self.plan.drawn_and_saved - len(tally.passed)
        tally.tokens_alone = message.tokens_alone
        self._sampling = message.sampling
        tally.planned = None if message.sampling is None else message.sampling.over(tally.wanted)
        self.listener.backend_opened(message)

    def _save_failure(self, place: Place, message: Found | Located) -> None:
        """Save a failure at once; its shrunk form later replaces the saved one."""
        before = place.failures.pop() if isinstance(message, Located) and place.provisional else None
        saved, why = self.listener.failure_found(message.failure, before)
        self.trouble(why)
        place.failures.append(saved)
        place.provisional = isinstance(message, Found)
        if isinstance(message, Located):
            self.tally.shrink_seconds = max(self.tally.shrink_seconds, message.shrink_s)

    def bury(self, number: int, place: Place, how: str) -> None:
        """A worker died: report its case, and start a replacement.

        There is none if the worker was shrinking (the failure is reported as drawn), at the end of a run, or after
        too many deaths.
        """
        case = place.case
        place.deaths += 1
        where = "" if case is None else f" at case {case.id}"
        if place.provisional:
            place.over = True
            self.trouble(f"worker {number} died ({how}) while it made a failure smaller: the failure is told as it was")
            return
        if self.stopping or place.deaths > REPLACEMENTS:
            place.over = True
            file = None if case is None else self.listener.worker_lost(case)
            saved = f", saved as {file}" if file else ""
            self.trouble(f"worker {number} died ({how}){where}{saved}; its other cases were not judged")
            self.code = 3 if self.code is None else self.code
            return
        # From the second death in this place on, the current case is given up; the first may have had another cause.
        if case is not None and place.deaths > 1 and case.id not in place.judged:
            place.judged[case.id] += 1
            file = self.listener.worker_lost(case)
            saved = f" (saved as {file})" if file else ""
            self.trouble(
                f"case {case.id}{saved} was given up: worker {number} died at it ({how}), as one before it did"
            )
        self.tally.replaced += 1
        place.case = None
        assert self.crew is not None
        self.crew.replace(number, tuple(place.judged.elements()))
        # The replacement has not heard the order that its predecessor got.
        if self._enough:
            self._tell_crew(ENOUGH)

    def _conclude(self, ended: Ended) -> None:
        """Add the facts that only a whole run shows: an early end, gaps, and ties or samples beyond chance."""
        tally, interrupted = self.tally, ended.interrupted
        tally.seconds = ended.seconds
        tally.failures = by_cause([failure for place in self.places for failure in place.failures])
        tally.excess_ties = excess_ties(tally) or excess_choices(tally) or tally.excess_ties
        tally.excess_evidence = excess_evidence(tally)
        tally.excess_error = excess_error(tally.control_errors)
        if interrupted is not None:
            tally.stopped = f"interrupted ({interrupted})"
            tally.errors.append(f"interrupted after {tally.cases} cases: what did not run is not a pass")
        elif tally.failures and self._enough and tally.cases < tally.wanted:
            more = "" if self.plan.max_failures > 1 else "first "
            tally.stopped = f"at the {more}failure; --keep-going judges the rest"
        elif ended.late and tally.cases < tally.wanted:
            tally.stopped = f"time budget of {self.plan.time_budget_s:g} s used up"
        elif ended.exhausted and tally.cases < tally.wanted:
            tally.stopped = "there are no more cases to draw"
        spoken = [undecided_comparison(tally), nothing_fused(tally)]
        # Gaps count only in a run that would otherwise pass.
        if not tally.failures and self.code is None and interrupted is None:
            spoken += shortfalls(tally)
        tally.errors += [why for why in spoken if why is not None]
