"""The search loop of one worker: draw cases, judge them, shrink the first failure."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

from hypothesis.errors import Flaky

from specverify.campaign.aim import swarm_of_round
from specverify.campaign.novelty import Novelty
from specverify.campaign.shrinking import Shrinking
from specverify.plan import Plan
from specverify.properties.known import without_known_findings
from specverify.properties.planned_sampling import FOCUSED
from specverify.properties.strategies import cases
from specverify.properties.strategies.settings import SEARCHING, explore
from specverify.properties.strategies.swarm import Swarm
from specverify.properties.tally import Failure
from specverify.properties.verdict.finding import Verdict, run_facts
from specverify.properties.verdict.invariant import Invariant, Oracle, taking_turns
from specverify.properties.verdict.judge import judge
from specverify.properties.verdict.subject import Crash, Subject
from specverify.reference.case import Case
from specverify.reference.layout import KvLayout
from specverify.reference.malformed import Malformed
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.trace import Stage

Emit = Callable[[Verdict], None]

ROUND = 6
"""Cases that Hypothesis draws from one seed.

Later in a round Hypothesis draws values that resemble its earlier ones. With rounds of 6 instead of 100, sessions are
three times as frequent, rare conditions appear within half as many cases, and drawing takes two thirds of the time.
"""

BARREN = 8
"""Number of successive rounds without a new case after which a search ends as exhausted."""

SHORT = 4
"""Turns of an invariant that a run has to have room for, so that their chance leaves hardly any invariant without one.

With one turn in two or four cases, an invariant has none in 1 of 100 runs that are just long enough.
"""


def round_seed(number: int, rounds: int) -> int:
    """The seed of the round that follows `rounds` other rounds of a search."""
    # The stride keeps the rounds of neighbouring seeds (workers differ by 1) apart.
    return number + 1_000_003 * rounds


class Enough(BaseException):
    """Ends a Hypothesis run from inside.

    It is no Exception, so that Hypothesis does not take it for a failing case.
    """


class AlwaysBroken(Exception):
    """A user's function breaks its contract on every case: nothing it answers can be judged."""


class Differs(Exception):
    """Raised to Hypothesis when a case fails."""


@dataclass
class Search:
    """One worker's search.

    Attributes:
        plan: The worker's slice of the plan.
        invariants: The invariants to check.
        oracle: The reference.
        subject: The backend.
        emit: Called with each verdict, as soon as the case is judged.
        stopped: Whether no further case may begin.
        halted: Whether shrinking must end too; if None, `stopped` decides both.
        on_begin: Called with each case before it is judged.
        on_failure: Called with a failure as drawn, before it is shrunk.
        shrink_s: Seconds that shrinking the last failure took.
        exhausted: Whether the search ended because there were no more new cases.
    """

    plan: Plan
    invariants: tuple[Invariant, ...]
    oracle: Oracle
    subject: Subject
    emit: Emit
    stopped: Callable[[], bool]
    halted: Callable[[], bool] | None = None
    on_begin: Callable[[Case], None] = lambda case: None
    on_failure: Callable[[Failure], None] = lambda failure: None
    shrink_s: float = 0.0
    exhausted: bool = False
    _shrinking: Shrinking | None = None
    _error: Exception | None = None
    _drawn_ids: set[str] = field(default_factory=set)
    _judged_counts: Counter[str] = field(default_factory=Counter)
    _asked: set[str] = field(default_factory=set)
    _reported: set[tuple[str, Stage]] = field(default_factory=set)
    _rounds: int = 0
    _has_answer: bool = False
    _novelty: Novelty = field(default_factory=Novelty)

    def skip_cases(self, judged: Iterable[str]) -> None:
        """Skip the cases with the ids `judged`, which a dead worker in this place has judged.

        A case may be given several times, by several lanes; each time that it was judged counts once.
        """
        self._judged_counts.update(judged)

    def continue_after(self, failure: Failure) -> None:
        """Prepare to search on after the failure `failure`; its invariant and stage are not reported again.

        The same holds for invariant and stage of the failure as drawn.
        """
        if self._shrinking is not None:
            self._reported |= self._shrinking.failed_stages
        self._reported.add((failure.finding.invariant, failure.finding.stage))
        self._shrinking = None

    def run(self) -> None:
        """Draw and judge the plan's cases; at the first difference, Hypothesis shrinks the case."""
        barren = 0
        # Hypothesis begins every round with the plainest case; a repeated case is judged and counted once.
        while len(self._drawn_ids) < self.plan.cases and barren < BARREN and not self.differs and not self.stopped():
            before = len(self._drawn_ids)
            # A new strategy and a new seed each round: Hypothesis draws more varied cases in short rounds (ROUND).
            plan, subject = self.plan, self.subject
            interval, within = subject.variant_interval, subject.abilities
            number = round_seed(plan.seed, self._rounds)
            focused = plan.focus is not None
            # A focused run has one question, for which nothing is to be left out.
            swarm = Swarm() if focused else swarm_of_round(number, within, interval > 1, self._novelty)
            drawn = cases(plan.dtypes, plan.processors, plan.layout, interval, within, focused, swarm)
            with suppress(Enough, Differs, Flaky):  # the failure is kept in `_shrinking`
                explore(number, ROUND, drawn, self._try, SEARCHING)
            if self._error is not None:
                raise self._error
            self._rounds += 1
            barren = 0 if len(self._drawn_ids) > before else barren + 1
        self.exhausted = barren >= BARREN

    def run_given(self, given_cases: Iterable[tuple[Case, tuple[Invariant, ...]]]) -> None:
        """Judge given cases, each by its own invariants, until the first difference."""
        for case, invariants in given_cases:
            if self._judged_counts[case.id] > 0:
                self._judged_counts[case.id] -= 1
                continue
            if self.stopped():
                break
            self.on_begin(case)
            verdict = self._verdict_on(case, invariants)
            self.emit(verdict)
            if self._is_new(verdict):
                self._begin_shrinking(verdict)
                break

    @property
    def smallest(self) -> Case | None:
        """The smallest differing case so far, or None."""
        return None if self._shrinking is None else self._shrinking.smallest.case

    @property
    def blamed(self) -> set[tuple[str, Stage]] | None:
        """Invariant and stage of the difference, as drawn and as it goes on; None where nothing differed."""
        return None if self._shrinking is None else self._shrinking.failed_stages

    @property
    def differs(self) -> bool:
        """Whether a difference was found."""
        return self._shrinking is not None

    def failure(self, search_nearest: bool = True) -> Failure | None:
        """The failure on its smallest case (`Shrinking.failure`), or None if nothing differed."""
        if self._shrinking is None:
            return None
        failure = self._shrinking.failure(self.invariants, search_nearest)
        self.shrink_s = time.monotonic() - self._shrinking.began
        return failure

    def _try(self, case: Case) -> None:
        """The function that Hypothesis calls; an unexpected exception ends the search instead of failing the case."""
        try:
            self._judge(case)
        except (Enough, Differs):
            raise
        except Exception as error:
            self._error = error
            raise Enough from error

    def _judge(self, case: Case) -> None:
        if self._shrinking is None:
            self._judge_drawn(case)
        elif self._shrinking.out_of_time():
            raise Enough
        elif self._shrinking.fails_alike(case) is not None:
            raise Differs

    def _judge_drawn(self, case: Case) -> None:
        """Judge a new case; end the round once the plan's number of cases is reached."""
        if self.stopped():
            raise Enough
        if case.id in self._drawn_ids or (self.plan.focus is None and not self._novelty.takes(case)):
            return
        # A case that a dead worker has judged counts as seen, so that the plan's number is not exceeded.
        self._drawn_ids.add(case.id)
        if case.id not in self._judged_counts:
            self.on_begin(case)
            always = FOCUSED if self.plan.focus is not None else frozenset()
            turns = taking_turns(case, self.invariants, self.subject.pace, always | self._due(case))
            self._asked.update(invariant.name for invariant in turns if invariant.applies(case))
            verdict = self._verdict_on(case, turns)
            self.emit(verdict)
            if self._is_new(verdict):
                self._begin_shrinking(verdict)
                raise Differs
        if len(self._drawn_ids) == self.plan.cases:
            raise Enough

    def _due(self, case: Case) -> frozenset[str]:
        """Invariants whose turn comes now because it would come too late, or not at all, by itself.

        Where the engine shows nothing but tokens, few invariants judge a case, so that each has its first turn in the
        first case to which it applies: the law of sampled texts in the first sampled case. Those of every single
        request have their turn in every session there. In a run of N cases, fewer than SHORT times what lies between an
        invariant's turns, each has a turn in one case of N whatever their ids. A slow backend is spared both: variants
        cost it most.
        """
        count = self.plan.cases
        if self.subject.variant_interval > 1:
            return frozenset()
        pace = self.subject.pace
        turning = [entry for entry in enumerate(self.invariants) if entry[1].interval(case, pace) > 1]
        first_turns = (
            {
                invariant.name
                for _, invariant in turning
                if (invariant.name not in self._asked or invariant.every == 1) and invariant.applies(case)
            }
            if self.subject.reveals <= {Stage.EMITTED}
            else set()
        )
        return frozenset(first_turns) | frozenset(
            invariant.name
            for place, invariant in turning
            if invariant.interval(case, pace) * SHORT > count and (len(self._drawn_ids) + place) % count == 0
        )

    def _verdict_on(self, case: Case, invariants: tuple[Invariant, ...]) -> Verdict:
        """The verdict on `case`, without findings that the plan's ledger knows.

        Raises:
            AlwaysBroken: It is the first, and the user's function breaks its contract on this case as on others.
        """
        if not self._has_answer:
            self._check_contract(case)
        return without_known_findings(judge(case, invariants, self.oracle, self.subject), self.plan.known_failures)

    def _check_contract(self, case: Case) -> None:
        """See that the user's function answers `case` or one of its witnesses in a form of its contract."""
        self._has_answer = True
        outcome = self.subject.outcome(case)
        if not isinstance(outcome, Crash) or not outcome.is_contract:
            return
        outcomes = [self.subject.outcome(witness) for witness in contract_witnesses(case)]
        if outcomes and all(isinstance(other, Crash) and other.is_contract for other in outcomes):
            raise AlwaysBroken(outcome.why)

    def _is_new(self, verdict: Verdict) -> bool:
        """Whether the verdict's first finding has an invariant and a stage that were not reported before."""
        located = verdict.first
        return located is not None and (located.invariant, located.stage) not in self._reported

    def _begin_shrinking(self, verdict: Verdict) -> None:
        """Report the first difference as drawn, then begin to shrink it."""
        self._shrinking = Shrinking(self.plan, self.invariants, self.oracle, self.subject, self._is_halted, verdict)
        self.on_failure(self._shrinking.as_drawn())
        self._shrinking.blame()

    def _is_halted(self) -> bool:
        return (self.stopped if self.halted is None else self.halted)()


def contract_witnesses(case: Case) -> Iterator[Case]:
    """Plain cases on the same models: other prompts of the same length, greedy, with room for one, two and five tokens.

    A script of trees begins with the last token of the prompt, so that its case has no witness.
    """
    plain_case = replace(case, sampling=Sampling(), layout=KvLayout(), steps=0, session=None)
    for shift, room in enumerate((1, 2, 5), 1):
        prompt = tuple((token + shift) % case.model.vocab_size for token in case.prompt)
        with suppress(Malformed):
            yield replace(plain_case, prompt=prompt, stops=Stops(room))


def without_trace(verdict: Verdict, recorded: bool = False) -> Verdict:
    """The verdict without its trace, as workers send it to the campaign; with what the run did if it is `recorded`."""
    run = run_facts(verdict.trace) if recorded and verdict.trace is not None else None
    return replace(verdict, trace=None, run=run)
