"""The judge: every applicable invariant asked of one case, for one verdict.

The command line and pytest share it.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from specverify.properties.accepted_ranks import RankCounts, counts_by_draft, sum_counts
from specverify.properties.verdict.coverage.pairs import labels_of_requests
from specverify.properties.verdict.finding import (
    ASKED_BY,
    COMPLETES,
    FINISHED,
    STAGE_UNKNOWN,
    Comparisons,
    ControlError,
    Evidence,
    Finding,
    IndexingCounts,
    Outcome,
    Positions,
    PredictedTies,
    Reads,
    RoutingCounts,
    RoutingTie,
    Tie,
    Verdict,
)
from specverify.properties.verdict.followed import follow
from specverify.properties.verdict.head_routing import explain_by_head
from specverify.properties.verdict.internal import JUDGE, InternalError, internal_error
from specverify.properties.verdict.invariant import (
    Expects,
    Fact,
    Invariant,
    NoReference,
    NotApplicable,
    Oracle,
    Unobserved,
)
from specverify.properties.verdict.routing import Exchanges
from specverify.properties.verdict.session_members import before_a_switch, members, view
from specverify.properties.verdict.subject import Crash, NoTrace, Refusal, Subject
from specverify.reference.case import Case
from specverify.reference.gone import EngineGone
from specverify.reference.malformed import Malformed
from specverify.reference.trace import Stage, Trace
from specverify.reference.user_processors import Inadmissible

FINDINGS_PER_INVARIANT = 3
"""Most findings of one invariant: further differences in a broken tensor explain nothing more."""


def judge(case: Case, invariants: Sequence[Invariant], oracle: Oracle, subject: Subject) -> Verdict:
    """Check `case` against every invariant that applies to it.

    An invariant is `checked` where it compared something (`Comparisons`). It is unobserved where its evidence is
    missing, and not applicable where it has nothing to say or asks for a run that the backend declines. A run that
    breaks is a finding of `lossless.completes` and leaves the other invariants unobserved; the steps before the break
    are judged as a shorter case, whose findings come first. A further run that breaks is a finding of
    `lossless.completes` too, unless that is not among `invariants`.

    In a session, each request is judged as the case that it would be alone, by the invariants that read a run as it
    was. The session as a whole is judged by those that speak of sessions.

    An exception inside an invariant is its outcome `internal`; all others are asked as before. One of the judge itself
    is told under the name JUDGE, and leaves the invariants internal that had no answer yet.

    Raises:
        Inadmissible: when a custom processor of the case fails the oracle itself.
        EngineGone: when the engine cannot be asked any more.
    """
    began = time.perf_counter()
    errors: list[InternalError] = []
    verdict = Verdict(case, subject.name, {invariant.name: "internal" for invariant in invariants})
    with _record_errors(JUDGE, errors):
        verdict = _judge_run(
            case, invariants, oracle, subject, other_scope="session" if case.session is None else "request"
        )
        if case.session is not None and verdict.trace is not None:
            verdict = _with_members(case, verdict, invariants, oracle, subject, errors)
        if any(invariant.name == COMPLETES for invariant in invariants):
            verdict = _with_crashes_named(verdict)
    labels: tuple[tuple[int, ...], ...] = ()
    with _record_errors(JUDGE, errors):
        labels = labels_of_requests(case, verdict.trace) if verdict.trace is not None and verdict.judged else ()
    outcomes = {invariant.name: verdict.outcomes.get(invariant.name, "not_applicable") for invariant in invariants}
    seconds = time.perf_counter() - began
    internal = (*verdict.internal, *errors)
    return replace(verdict, outcomes=outcomes, seconds=seconds, labels=labels, internal=internal)


def _with_members(
    case: Case,
    verdict: Verdict,
    invariants: Sequence[Invariant],
    oracle: Oracle,
    subject: Subject,
    errors: list[InternalError],
) -> Verdict:
    """`verdict` with the verdicts on the requests of the session."""
    trace = verdict.trace
    assert trace is not None
    run_invariants = [invariant for invariant in invariants if invariant.looks_at_run]
    with _record_errors(JUDGE, errors):
        for place, member in enumerate(members(case, trace)):
            member_subject = view(subject, member, assumes_noise=place > 0)
            verdict = _join(verdict, _judge_run(member.alone, run_invariants, oracle, member_subject), member.number)
        draft_invariants = [invariant for invariant in run_invariants if invariant.name.startswith("draft.")]
        for member in before_a_switch(case, trace):
            part = _judge_run(member.alone, draft_invariants, oracle, view(subject, member, assumes_noise=True))
            # The steps were counted with the whole request.
            verdict = _join(verdict, replace(part, accept_lengths=(), ranks={}), member.number)
    return verdict


def _with_crashes_named(verdict: Verdict) -> Verdict:
    """`verdict` with runs that broke under the invariant of broken runs, whatever invariant asked for them."""
    findings = tuple(
        replace(finding, invariant=COMPLETES, where={**finding.where, ASKED_BY: finding.invariant})
        if finding.expected == FINISHED and finding.invariant != COMPLETES
        else finding
        for finding in verdict.findings
    )
    if findings == verdict.findings:
        return verdict
    return replace(verdict, findings=findings, outcomes={**verdict.outcomes, COMPLETES: "failed"})


@contextmanager
def _record_errors(invariant: str, errors: list[InternalError]) -> Iterator[None]:
    """Add an exception of `invariant` to `errors`, unless it ends the run."""
    try:
        yield
    except (EngineGone, Inadmissible):
        raise
    except Exception as error:
        errors.append(internal_error(invariant, error))


OUTCOMES = ("failed", "internal", "checked", "unobserved", "not_applicable")
"""Outcomes, the most telling first: the outcome of a session is the first that any of its requests has."""


def _join(verdict: Verdict, part: Verdict, request: int) -> Verdict:
    """`verdict` with the findings and counts of one request added."""
    outcomes = {**part.outcomes, **verdict.outcomes}
    for name in set(part.outcomes) & set(verdict.outcomes):
        outcomes[name] = min(part.outcomes[name], verdict.outcomes[name], key=OUTCOMES.index)
    findings = tuple(replace(finding, where={**finding.where, "request": request}) for finding in part.findings)
    return replace(
        verdict,
        outcomes=outcomes,
        findings=(*verdict.findings, *findings),
        ties=(*verdict.ties, *part.ties),
        routing_ties=(*verdict.routing_ties, *part.routing_ties),
        routed=verdict.routed + part.routed,
        indexed=verdict.indexed + part.indexed,
        positions=verdict.positions + part.positions,
        predicted_ties=_sum_tables(verdict.predicted_ties, part.predicted_ties),
        evidence=(*verdict.evidence, *part.evidence),
        control_errors=(*verdict.control_errors, *part.control_errors),
        unsupported=verdict.unsupported or part.unsupported,
        forward_s=verdict.forward_s + part.forward_s,
        attention_calls=verdict.attention_calls + part.attention_calls,
        fallbacks=Counter(verdict.fallbacks) + Counter(part.fallbacks),
        # The whole verdict already counts request 0, whose steps are those of the session's own trace.
        accept_lengths=(*verdict.accept_lengths, *(part.accept_lengths if request else ())),
        ranks=sum_counts(verdict.ranks, part.ranks) if request else verdict.ranks,
        compared=Counter(verdict.compared) + Counter(part.compared),
        commits=Counter(verdict.commits) + Counter(part.commits),
        commit_fallbacks=Counter(verdict.commit_fallbacks) + Counter(part.commit_fallbacks),
        internal=(*verdict.internal, *(replace(error, request=request) for error in part.internal)),
    )


def _sum_tables(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    """The sums of two tables, by name."""
    return {name: first.get(name, 0.0) + second.get(name, 0.0) for name in {**first, **second}}


def _judge_run(
    case: Case, invariants: Sequence[Invariant], oracle: Oracle, subject: Subject, other_scope: str = "session"
) -> Verdict:
    """The verdict on one run; invariants with `speaks_of` equal to `other_scope` do not apply to it."""
    forward_s_before = subject.forward_s
    calls_before = subject.attention_calls
    fallbacks_before = subject.fallbacks.copy()
    commits_before = subject.commits.copy()
    commit_fallbacks_before = subject.commit_fallbacks.copy()
    outcomes: dict[str, Outcome] = {}
    answers: dict[str, _Answer] = {}
    errors: list[InternalError] = []
    trace, declined = _first_run(case, subject)
    plain_oracle = oracle
    with _record_errors(JUDGE, errors):
        oracle = plain_oracle if trace is None else follow(case, plain_oracle, trace.steps)
        if trace is not None and isinstance(oracle, Expects):
            oracle.expect(case, trace.steps)
    exchanges = Exchanges(oracle)
    if trace is None and declined is None and case.sampling.processors:
        _blame_processors(case, oracle)
    for invariant in invariants:
        if declined is not None or invariant.speaks_of == other_scope or not _is_promised(invariant, subject):
            outcomes[invariant.name] = "not_applicable"
            continue
        answer = _Answer()
        with _record_errors(invariant.name, answer.errors):
            if not invariant.applies(case):
                outcomes[invariant.name] = "not_applicable"
                continue
            if not _is_observed(invariant, subject, trace):
                outcomes[invariant.name] = "unobserved"
                continue
            _ask(invariant, case, oracle, subject, trace, exchanges, answer)
        errors += answer.errors
        outcomes[invariant.name] = answer.outcome
        answers[invariant.name] = answer
    findings = [finding for answer in answers.values() for finding in answer.findings]
    compared = {name: answer.compared for name, answer in answers.items() if answer.judged}
    with _record_errors(JUDGE, errors):
        shorter = _longest_survivor(case, subject) if trace is None and declined is None else None
        if shorter is not None:
            # The steps before the break say where the fault lies: the break may only be its consequence.
            earlier = judge(shorter, invariants, plain_oracle, subject)
            trace = earlier.trace
            answered = ("checked", "failed", "internal")
            outcomes |= {name: outcome for name, outcome in earlier.outcomes.items() if outcome in answered}
            compared |= earlier.compared
            errors += earlier.internal
            outcomes |= {finding.invariant: "failed" for finding in findings}
            num_survived = shorter.steps or len(shorter.session.actions if shorter.session else ())
            findings = [
                *earlier.findings,
                *(replace(finding, step=finding.step + num_survived) for finding in findings),
            ]
    ranks: dict[str, RankCounts] = {}
    with _record_errors(JUDGE, errors):
        ranks = {} if trace is None else counts_by_draft(case.draft, trace.steps)
    return Verdict(
        case=case,
        backend=subject.name,
        outcomes=outcomes,
        findings=tuple(findings),
        ties=tuple(tie for answer in answers.values() for tie in answer.ties),
        routing_ties=tuple(tie for answer in answers.values() for tie in answer.routing_ties),
        routed=sum((answer.routed for answer in answers.values()), RoutingCounts()),
        indexed=sum((answer.indexed for answer in answers.values()), IndexingCounts()),
        positions=sum((answer.positions for answer in answers.values()), Positions()),
        predicted_ties={
            name: answer.predicted_ties for name, answer in answers.items() if answer.predicted_ties is not None
        },
        evidence=tuple(test for answer in answers.values() for test in answer.evidence),
        control_errors=tuple(error for answer in answers.values() for error in answer.control_errors),
        trace=trace,
        unsupported=_no_reference(case, oracle) if any(answer.unanswered for answer in answers.values()) else declined,
        forward_s=subject.forward_s - forward_s_before,
        attention_calls=subject.attention_calls - calls_before,
        fallbacks=dict(subject.fallbacks - fallbacks_before),
        accept_lengths=tuple(len(step.accepted.path) - 1 for step in trace.steps if step.accepted) if trace else (),
        ranks=ranks,
        revealed=None if trace is None else revealed_by(trace),
        speculated=None if trace is None else trace.speculated,
        compared=compared,
        commits=dict(subject.commits - commits_before),
        commit_fallbacks=dict(subject.commit_fallbacks - commit_fallbacks_before),
        internal=tuple(errors),
    )


@dataclass
class _Answer:
    """The answer of one invariant on one case; `silent_outcome` is its outcome where it made no comparison."""

    findings: list[Finding] = field(default_factory=list)
    ties: list[Tie] = field(default_factory=list)
    routing_ties: list[RoutingTie] = field(default_factory=list)
    evidence: list[Evidence] = field(default_factory=list)
    control_errors: list[ControlError] = field(default_factory=list)
    positions: Positions = field(default_factory=Positions)
    predicted_ties: float | None = None
    routed: RoutingCounts = field(default_factory=RoutingCounts)
    indexed: IndexingCounts = field(default_factory=IndexingCounts)
    compared: int = 0
    errors: list[InternalError] = field(default_factory=list)
    silent_outcome: Outcome = "unobserved"
    cut_off: bool = False
    unanswered: bool = False

    def add(self, fact: Fact | RoutingTie) -> None:
        """Take one fact that the check yielded, or the tie that explains a finding."""
        if isinstance(fact, Comparisons):
            self.compared += fact.count
            self.silent_outcome = "not_applicable"
        elif isinstance(fact, Tie):
            self.ties.append(fact)
        elif isinstance(fact, Positions):
            self.positions = self.positions + fact
            self.predicted_ties = (self.predicted_ties or 0.0) + fact.predicted
        elif isinstance(fact, PredictedTies):
            self.predicted_ties = (self.predicted_ties or 0.0) + fact.count
        elif isinstance(fact, RoutingTie):
            self.routing_ties.append(fact)
        elif isinstance(fact, RoutingCounts):
            self.routed = self.routed + fact
        elif isinstance(fact, IndexingCounts):
            self.indexed = self.indexed + fact
        elif isinstance(fact, Evidence):
            self.evidence.append(fact)
        elif isinstance(fact, ControlError):
            self.control_errors.append(fact)
        else:
            self.findings.append(fact)

    @property
    def judged(self) -> bool:
        """Whether the check found a difference, or compared something and was not cut off by missing evidence."""
        return bool(self.findings) or (self.compared > 0 and not self.cut_off and not self.errors)

    @property
    def outcome(self) -> Outcome:
        """The outcome, a word of OUTCOMES."""
        if self.errors and not self.findings:
            return "internal"
        if self.findings:
            return "failed"
        return "checked" if self.judged else self.silent_outcome


def _ask(
    invariant: Invariant,
    case: Case,
    oracle: Oracle,
    subject: Subject,
    trace: Trace | None,
    exchanges: Exchanges,
    answer: _Answer,
) -> None:
    """Take the answer of `invariant` on `case`; `trace` is the trace of the case's run, None where the run broke."""
    excused_reads = list[Reads]()
    try:
        for fact in invariant.check(case, oracle, subject):
            tie = None
            # A finding that cannot be compared with ties stays a finding.
            with _record_errors(JUDGE, answer.errors):
                tie = (exchanges.explain(fact) or explain_by_head(fact, oracle)) if isinstance(fact, Finding) else None
            if isinstance(fact, Finding) and fact.reads is not None:
                excused_reads += [] if tie is None or fact.reads.by_head else [fact.reads]
                fact = replace(fact, reads=None)
            answer.add(tie or fact)
            if len(answer.findings) == FINDINGS_PER_INVARIANT:
                break
    except Unobserved:
        answer.cut_off = True
        answer.silent_outcome = "unobserved"
    except (NotApplicable, Malformed) as error:
        # Malformed: the check asked for a variant that does not fit the model, such as one node too many for its
        # longest sequence.
        if isinstance(error, Inadmissible):
            _blame_processors(case, oracle)
        answer.silent_outcome = "not_applicable"
        answer.unanswered = isinstance(error, NoReference)
    except NoTrace as no_trace:
        if isinstance(no_trace.outcome, Crash) and trace is not None:
            answer.findings.append(crash_finding(invariant.name, no_trace.outcome, len(trace.steps)))
        answer.silent_outcome = "not_applicable" if trace is not None else "unobserved"
    if excused_reads and not answer.findings and _saw_no_clear_row(excused_reads, exchanges, trace):
        answer.cut_off = True
        answer.silent_outcome = "unobserved"


def _saw_no_clear_row(excused: list[Reads], exchanges: Exchanges, trace: Trace | None) -> bool:
    """Whether every row with which an invariant could be judged has a tie above it.

    An invariant that compares layer by layer has seen the first one, whose attention reads columns, and no experts.
    """
    by_layer = [replace(reads, before=0) for reads in excused if reads.before is not None]
    reads = max(by_layer, key=lambda reads: reads.attends, default=excused[0])
    steps = () if trace is None else trace.steps
    return not any(exchanges.has_clear_row(step, reads) for step in steps)


def crash_finding(invariant: str, outcome: Crash, step: int = 0) -> Finding:
    """The finding that a run broke: the run of the case itself, or of a variant that an invariant asked for.

    The steps of a variant are not those of the case, so its finding comes after all of the case's (`step`).
    """
    where: dict[str, int | str] = {} if outcome.stage is not None else {"side": STAGE_UNKNOWN}
    stage = outcome.stage if outcome.stage is not None else Stage.DRAFTED
    return Finding(invariant, stage, step, where, FINISHED, outcome.why, said=outcome.said)


def _blame_processors(case: Case, oracle: Oracle) -> None:
    """Raise Inadmissible if a processor fails the oracle too: the processor is then at fault, and not the backend."""
    try:
        oracle(case)
    except Inadmissible:
        raise
    except (Malformed, NoTrace):
        return  # each invariant meets the same error and gives its own outcome


def _first_run(case: Case, subject: Subject) -> tuple[Trace | None, str | None]:
    """The trace, or None, and the reason why the backend declined, or None."""
    try:
        return subject(case), None
    except NoTrace as no_trace:
        return None, no_trace.outcome.why if isinstance(no_trace.outcome, Refusal) else None


def _no_reference(case: Case, oracle: Oracle) -> str | None:
    """Why the backend in the oracle's place has no answer for `case`; None where only variants lack an answer."""
    try:
        oracle(case)
    except NoReference as error:
        return str(error)
    return None


def _longest_survivor(case: Case, subject: Subject) -> Case | None:
    """The same case, stopped after the last step or action that the backend survives; None if it survives none."""
    survived = None
    if case.session is not None:
        for count in range(1, len(case.session.actions)):
            fewer = replace(case, session=replace(case.session, actions=case.session.actions[:count]))
            try:
                subject(fewer)
            except NoTrace:
                return survived
            survived = fewer
        return survived
    for steps in range(1, case.stops.max_new_tokens + 1):
        shorter = replace(case, steps=steps)
        try:
            if shorter == case or len(subject(shorter).steps) < steps:
                return survived
        except NoTrace:
            return survived
        survived = shorter
    return survived


def revealed_by(trace: Trace) -> frozenset[Stage]:
    """The stages that the trace holds in any step of any request."""
    runs = [trace] if trace.shared is None else [request for request in trace.shared.requests if request is not None]
    steps = [step for run in runs for step in run.steps]
    return frozenset(stage for stage in Stage if any(getattr(step, stage.word) is not None for step in steps))


def _is_promised(invariant: Invariant, subject: Subject) -> bool:
    """Whether the backend makes the promise that the invariant is about; True where it is about none."""
    return not invariant.promise or bool(getattr(subject.abilities, invariant.promise, False))


def _is_observed(invariant: Invariant, subject: Subject, trace: Trace | None) -> bool:
    # The declaration rules first: a stage that a trace happens to hold is not judged unless it is declared.
    if not invariant.needs <= subject.reveals:
        return False
    if trace is None:
        return not invariant.needs
    return invariant.needs <= revealed_by(trace)
