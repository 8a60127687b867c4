"""A live session that is compared with the oracle after every action."""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import NoReturn

from specverify.properties.invariants import ALL
from specverify.properties.invariants.cache.pages import allocator_conserves
from specverify.properties.verdict.finding import Finding, Verdict
from specverify.properties.verdict.invariant import Oracle
from specverify.properties.verdict.judge import judge
from specverify.properties.verdict.subject import Crash, NoTrace, Refusal, Subject
from specverify.reference.case import Case
from specverify.reference.malformed import Malformed
from specverify.reference.session import Action, Session
from specverify.reference.trace import Stage, Trace

INTERRUPTIONS = ("preempt", "evict", "cancel")

LIVE_INVARIANTS = tuple(
    invariant for invariant in ALL if invariant.every == 1 and invariant.name != "lossless.draft-independent"
)
"""Invariants that judge a session from its trace alone.

lossless.draft-independent is left out: it runs every request again, and the comparison with the oracle's output shows
the same faults.
"""


class Difference(Exception):
    """Raised when a session violates an invariant; `verdict` judges the case made of its actions so far."""

    def __init__(self, verdict: Verdict) -> None:
        finding = verdict.first
        assert finding is not None
        super().__init__(f"{finding.invariant} at {finding.stage.name}: {finding.expected!r}, not {finding.observed!r}")
        self.verdict = verdict


@dataclass
class SessionStats:
    """The counts of watched sessions.

    Attributes:
        sessions: Sessions that were closed without a difference.
        judged: Number of those whose requests were all judged by every invariant that needs no further run.
        actions: Actions by kind; only those that named a request on which they could act.
        steps: Actions in which at least one request took a step.
        advances: Steps of single requests.
        interruptions: Requests interrupted, by kind.
        undisturbed: Interruptions after which another request, there at the time, went on as the oracle does.
        compared: Times that a request's output was compared with the oracle's.
        ties: Requests whose output differs from the oracle's although no invariant is violated (near-ties).
        declined: Sessions that the backend declined, by its reason.
        events: Launches of steps ahead of the host, and results that it took or skipped.
    """

    sessions: int = 0
    judged: int = 0
    actions: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    advances: int = 0
    interruptions: Counter[str] = field(default_factory=Counter)
    undisturbed: int = 0
    compared: int = 0
    ties: int = 0
    declined: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)


class JudgeFailure(Exception):
    """Raised where the judge itself raised an exception on a session that does not differ."""

    def __init__(self, verdict: Verdict) -> None:
        first = verdict.internal[0]
        super().__init__(f"internal error in {first.invariant}: {first.why}, case {verdict.case.id}")
        self.verdict = verdict


class Watch:
    """Plays actions on a live session of `case`, whose session lists the requests and may have no actions yet.

    After every action two things are checked: pages are conserved, and the output so far of each request that took a
    step is a prefix of the oracle's output for that request alone. At the end, every request is judged by every
    invariant that needs no further run.

    Attributes:
        case: The session, with the actions so far.
        new: Requests that have not entered yet.
        living: Requests that can take a step.
        evicted: Requests that lost their keys and values and wait to be restored.
    """

    def __init__(self, case: Case, oracle: Oracle, subject: Subject, stats: SessionStats) -> None:
        """Open the session.

        Raises:
            NoTrace: The backend declines the session, or crashes.
        """
        assert subject.serve is not None
        assert case.session is not None
        self.case = case
        self.new = set(range(1 + len(case.session.mates)))
        self.living: set[int] = set()
        self.evicted: set[int] = set()
        self._oracle = oracle
        self._subject = subject
        self._stats = stats
        self._live = subject.serve(case)
        self._cancelled: set[int] = set()
        self._oracle_runs: dict[int, Trace | None] = {}
        self._emitted: dict[int, int] = {}
        self._tied: set[int] = set()
        self._witnesses: list[set[int]] = []
        self._trace = Trace((), (), None)

    def do(self, action: Action) -> None:
        """Play `action` on the backend, then check the pages and every request that took a step.

        Raises:
            Differs: An invariant is violated.
            NoTrace: The backend declines to go on.
        """
        assert self.case.session is not None
        session = Session(self.case.session.mates, (*self.case.session.actions, action))
        self.case = replace(self.case, session=session)
        living_before = self.living
        try:
            # The session so far is part of `case` already, so that a crash is reported with the action that caused it.
            self._live.do(action)
            trace = self._live.trace
        except NoTrace as no_trace:
            if isinstance(no_trace.outcome, Refusal):
                raise
            raise Difference(self._verdict(no_trace.outcome)) from no_trace
        if trace.shared is None or len(trace.shared.requests) != 1 + len(session.mates):
            raise Difference(self._verdict(Crash(None, "the trace does not say what each request of the session did")))
        self._trace = trace
        self._follow(action, trace)
        self._count(action, living_before)
        self._look_at_pages(trace)
        advanced = [number for number in sorted(self._entered_requests(trace)) if self._has_advanced(number, trace)]
        self._stats.steps += bool(advanced)
        self._stats.advances += len(advanced)
        for number in advanced:
            self._compare(number, trace)
        for witnesses in [witnesses for witnesses in self._witnesses if witnesses & set(advanced)]:
            self._witnesses.remove(witnesses)
            self._stats.undisturbed += 1

    def close(self, thoroughly: bool = True) -> None:
        """Cancel the remaining requests; if `thoroughly`, judge every request by LIVE_INVARIANTS.

        Raises:
            Differs: An invariant is violated.
            Unjudged: The judge raised, and nothing differs.
        """
        assert self.case.session is not None
        if self.case.session.overlapped:  # what is still in flight is compared too
            for number in sorted(self.living):
                self.do(Action("resolve", (number,)))
                self.do(Action("resolve", (number,)))
        for number in sorted(self.living | self.evicted):
            self.do(Action("cancel", (number,)))
        if thoroughly:
            verdict = self._verdict(self._trace)
            if verdict.findings:
                raise Difference(verdict)
            if verdict.internal:
                raise JudgeFailure(verdict)
            self._stats.judged += 1
        self._stats.sessions += 1
        if self._trace.shared is not None:
            self._stats.events.update(event.kind for event in self._trace.shared.events)

    # The state of each request after an action.

    def _entered_requests(self, trace: Trace) -> set[int]:
        assert trace.shared is not None
        return {number for number, request in enumerate(trace.shared.requests) if request is not None}

    def _follow(self, action: Action, trace: Trace) -> None:
        """Update the sets of new, living and evicted requests, from the last account, or from `action` without one."""
        assert trace.shared is not None
        entered = self._entered_requests(trace)
        self.new -= entered
        finished = {number for number in entered if getattr(trace.shared.requests[number], "finish", None) is not None}
        if action.kind == "cancel":
            self._cancelled |= set(action.requests) & entered
        finished |= self._cancelled
        if trace.shared.accounts:
            self.living = set(trace.shared.accounts[-1].committed) - finished
            self.evicted = entered - self.living - finished
        else:
            # Without accounts: an eviction moves living requests over, a restoration moves them back.
            moved = {"evict": self.living, "restore": self.evicted}.get(action.kind, set()) & set(action.requests)
            self.evicted = (self.evicted ^ moved) - finished
            self.living = entered - self.evicted - finished

    def _count(self, action: Action, before: set[int]) -> None:
        if action.kind in INTERRUPTIONS:
            for number in set(action.requests) & before:
                self._stats.interruptions[action.kind] += 1
                if before - {number}:
                    # The interruption counts as undisturbed once one of the other requests advances correctly.
                    self._witnesses.append(before - set(action.requests))
        if set(action.requests) & (before | self.living):
            self._stats.actions[action.kind] += 1

    def _has_advanced(self, number: int, trace: Trace) -> bool:
        assert trace.shared is not None
        request = trace.shared.requests[number]
        assert request is not None
        num_steps = len(request.steps)
        grown = num_steps > self._emitted.get(number, 0)
        self._emitted[number] = num_steps
        return grown

    # The checks after an action.

    def _look_at_pages(self, trace: Trace) -> None:
        assert trace.shared is not None
        if not self.case.layout.traits.pages or not trace.shared.accounts:
            return
        # Earlier accounts were checked after their own actions.
        last = replace(trace, shared=replace(trace.shared, accounts=trace.shared.accounts[-1:]))
        facts = allocator_conserves(self.case, self._oracle, self._replay_subject(last))
        if any(isinstance(fact, Finding) for fact in facts):
            self._refuse(self._verdict(trace))

    def _compare(self, number: int, trace: Trace) -> None:
        """Compare the output so far with the oracle's; if they differ, the invariants decide whether they may."""
        assert trace.shared is not None
        request = trace.shared.requests[number]
        assert request is not None
        if number not in self._oracle_runs:
            self._oracle_runs[number] = self._oracle_run(number, trace.shared.prompts[number])
        expected = self._oracle_runs[number]
        # After a near-tie the texts differ for good.
        if expected is None or number in self._tied:
            return
        self._stats.compared += 1
        expected_output = expected.output[: len(request.output)]
        finish = expected.finish if len(request.output) == len(expected.output) else None
        if (request.output, request.finish) == (expected_output, finish):
            return
        verdict = self._verdict(trace)
        if verdict.findings or verdict.internal:
            self._refuse(verdict)
        self._tied.add(number)
        self._stats.ties += 1

    @staticmethod
    def _refuse(verdict: Verdict) -> NoReturn:
        raise Difference(verdict) if verdict.findings else JudgeFailure(verdict)

    def _oracle_run(self, number: int, prompt: tuple[int, ...]) -> Trace | None:
        """The oracle's run of request `number` alone, or None if sampling uses the backend's own coins.

        A request that switches drafts is greedy, so that its output does not depend on the drafts. None as well for a
        request that samples from trees by batch size: its coins decide over the trees of its batches.
        """
        alone = self.case.alone(number)
        before = prompt[: len(prompt) - len(alone.prompt)]
        if not alone.sampling.greedy and (not self._subject.takes_tape or alone.draft.dispatch is not None):
            return None
        try:
            return self._oracle(replace(self.case.alone(number, before), steps=0))
        except Malformed:
            return None

    def _verdict(self, outcome: Trace | Crash) -> Verdict:
        """The verdict on the session so far."""
        return judge(self.case, LIVE_INVARIANTS, self._oracle, self._replay_subject(outcome))

    def _replay_subject(self, outcome: Trace | Crash) -> Subject:
        """The backend as a Subject whose run of this session's case is the live `outcome`."""

        def run(case: Case) -> Trace | Refusal | Crash:
            return outcome if case == self.case else self._subject.outcome(case)

        subject = self._subject
        replay = Subject(subject.name, run, subject.reveals, tables=subject.tables, takes_tape=subject.takes_tape)
        # Enumerated laws are remembered by case, and stay valid for the same backend.
        replay.notes = subject.notes
        return replay


def locate(verdict: Verdict) -> tuple[str, Stage]:
    """The invariant and the stage of the finding nearest to the fault."""
    finding = verdict.first
    assert finding is not None
    return finding.invariant, finding.stage
