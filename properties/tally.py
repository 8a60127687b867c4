"""Tally: the result of a whole run of many cases, ready to be reported."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace

import numpy as np

from specverify.properties.laws.sampled.gate import ALPHA_RUN, culprits
from specverify.properties.laws.sampled.links import describe_bet
from specverify.properties.paired_acceptance import AcceptCounts, counts_of_lengths
from specverify.properties.reference_names import NUMPY
from specverify.properties.residue import Residue
from specverify.properties.speculation import Speculation
from specverify.properties.streams import SamplingPlan, Stream, run_evidence, streams_of
from specverify.properties.texts import Texts
from specverify.properties.verdict.coverage.pair_coverage import PairCoverage
from specverify.properties.verdict.finding import (
    CertifiedRows,
    ControlError,
    Evidence,
    Finding,
    IndexingCounts,
    Positions,
    RoutingCounts,
    RoutingTie,
    Tie,
    Verdict,
)
from specverify.properties.verdict.internal import ANSWER, InternalError
from specverify.properties.verdict.run_log import RunLog
from specverify.reference.case import Case
from specverify.reference.trace import CHOSEN, DENSE_MASK, Stage

EAGER_MODES = ("reference", "eager-aligned")
"""The modes, as a run's environment names them, in which no call takes a backend's own attention."""


def native_calls(mode: str | None, attention_calls: int, fallbacks: Mapping[str, int]) -> int:
    """The attention calls that took the own way of a backend that has one, in the mode that a run's facts name."""
    if mode in EAGER_MODES:
        return 0
    # An attention that chooses among ways tells each choice beside the fallbacks; a dense mask slows no kernel.
    other_reasons = (CHOSEN, DENSE_MASK)
    return max(0, attention_calls - sum(count for why, count in fallbacks.items() if not why.startswith(other_reasons)))


SUMS = (
    "cases",
    "reference_rows",
    "judged",
    "differed",
    "traces",
    "backend_seconds",
    "attention_calls",
    "routed",
    "indexed",
    "positions",
)
"""Fields of a tally that are sums over its cases."""

LISTS = ("ties", "routing_ties", "evidence", "control_errors")
"""Fields of a tally that list what its cases showed."""

TOTALS = (
    "fallbacks",
    "commits",
    "commit_fallbacks",
    "excused",
    "excused_checked",
    "known",
    "behind",
    "predicted_ties",
    "unsupported",
    "accept_lengths",
)
"""Fields of a tally that are sums by a key."""

COUNTED = (
    *SUMS, *LISTS, *TOTALS, "revealed", "dearest", "acceptance", "accepted_by_draft", "speculation", "invariants",
)  # fmt: skip
"""Fields of a tally that follow from its verdicts alone, beside `pairs`, `internal` and `log`."""

NUM_DEAREST = 5
"""Cases that a tally keeps because they took the most time."""

HERE = "here:"
"""The beginning of the names of backends that are objects of the user's process; no other process can open them."""


@dataclass
class Counts:
    """Outcomes of one invariant over the run; `failed` cases are among the `checked`.

    Attributes:
        checked: Cases in which the invariant compared something.
        failed: Those of them in which something differed.
        unobserved: Cases whose traces do not hold the invariant's evidence.
        not_applicable: Cases about which the invariant has nothing to say.
        compared: Comparisons over all cases (`specverify.properties.verdict.finding.Comparisons`).
        internal: Cases on which the invariant raised an exception, so that it has no answer.
    """

    checked: int = 0
    failed: int = 0
    unobserved: int = 0
    not_applicable: int = 0
    compared: int = 0
    internal: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(getattr(self, count.name) + getattr(other, count.name) for count in fields(self)))

    @property
    def turns(self) -> int:
        """Cases in which the invariant was asked."""
        return self.checked + self.unobserved + self.not_applicable


@dataclass(frozen=True)
class EagerOutcome:
    """The failing case on another backend: the one with eager attention on the same device.

    Attributes:
        outcome: agrees, differs, or why the case was not judged there.
        finding: The difference there, if any.
    """

    backend: str
    outcome: str
    finding: Finding | None = None


@dataclass(frozen=True)
class SameDefect:
    """The same defect as another worker met it.

    Attributes:
        invariant: The invariant that located it.
        stage: The stage at which it did.
        case: Id of the smallest case.
        file: Path of that case's bundle, or None.
    """

    invariant: str
    stage: Stage
    case: str
    file: str | None = None


@dataclass(frozen=True)
class Failure:
    """One located difference, with the smallest case that shows it.

    Attributes:
        verdict: The smallest failing case and all its findings.
        finding: The finding that locates it (`verdict.first` when found).
        drawn: Id of the case as first drawn, before shrinking.
        tried: Cases run while shrinking.
        nearest: The nearest case that agrees, or None when none was looked for or found.
        beside: The same case on the eager backend of the device; None where there is no other.
        also: The same defect as other workers met it, on cases of their own.
        file: Path of the saved bundle, once it is written.
        backend: Value of `--backend`, so that the replay command opens the same backend.
        model: Value of `--model` for a checkpoint, or None for built-in models.
        against: Value of `--against`, the reference in the oracle's place, or None for the NumPy oracle.
        reference: Value of `--reference`, what computed the oracle.
        texts: Prompt, right output and output of the request; None where the run does not show them.
        mistake: The mistake of an adapter that explains the texts (`specverify.properties.adapter_mistakes`), or None.
        known: Known faults of the engine that may be the cause, a sentence each.
    """

    verdict: Verdict
    finding: Finding
    drawn: str
    tried: int = 0
    nearest: Case | None = None
    file: str | None = None
    fault: str | None = None
    backend: str = "cpu-eager"
    model: str | None = None
    beside: EagerOutcome | None = None
    also: tuple[SameDefect, ...] = ()
    against: str | None = None
    reference: str = NUMPY
    texts: Texts | None = None
    mistake: str | None = None
    known: tuple[str, ...] = ()


@dataclass
class InternalFailure:
    """One exception inside the judge, as the cases of a run met it.

    Attributes:
        error: The exception, as the first case met it.
        cases: The number of cases that met it.
        saved: That case as a failure whose finding says that no answer came (`ANSWER`), once its file is written.
    """

    error: InternalError
    verdict: Verdict
    cases: int = 1
    saved: Failure | None = None

    def as_failure(self) -> Failure:
        """The case as a failure that a bundle holds; its finding has no stage to speak of."""
        error = self.error
        where: dict[str, int | str] = {} if error.request is None else {"request": error.request}
        finding = Finding(error.invariant, Stage.DRAFTED, 0, where, ANSWER, error.why, said=error.said)
        return Failure(self.verdict, finding, self.verdict.case.id)

    @property
    def line(self) -> str:
        """The exception in one line, for the reasons why a run could not judge."""
        times = "" if self.cases == 1 else f" and {self.cases - 1} more"
        return (
            f"internal error in {self.error.invariant}: {self.error.why}, on case {self.verdict.case.id}{times}; "
            "everything else was judged"
        )


@dataclass
class Tally:
    """The counts and findings of a run.

    Attributes:
        emulated: Whether the backend stands in for a device that is not there.
        varied: Prompts of which variants ran, and all prompts; None where cases are drawn.
        excluded: What the backend's declaration leaves out although its engine has it, `region: why`.
        cases: Cases drawn and reported by workers so far: judged, declined, or neither.
        wanted: Number of cases that the run was asked for.
        open_ended: Whether a time budget was to end the run, so that `wanted` is only the most that it would judge.
        judged: Cases on which at least one invariant was checked.
        declared: Stages that the backend declares to reveal.
        revealed: Stages that the backend's traces held.
        traces: Runs of cases that gave a trace.
        replaced: Worker processes that died and were replaced; other workers judged their cases.
        backend_seconds: Time inside the backend's forwards, summed over workers.
        shrink_seconds: Wall time spent shrinking, which `seconds` includes.
        invariants: Counts by invariant name, for every invariant that was selected.
        unsupported: Reasons for which the backend declined cases, each with the number of cases.
        accept_lengths: Number of steps for each number of accepted drafted tokens.
        accepted_by_draft: Kind of draft to (steps, accepted drafted tokens).
        acceptance: For each case in which tokens were drafted and counted, by its id, the counts of accepted ones.
        attention_calls: Calls of attention, one for each layer of each forward; 0 where they are not counted.
        fallbacks: Each reason why attention took a slower path than the backend's own, with the number of calls.
        has_kernel: Whether the row of the backend says that it has attention of its own.
        own_kernel: Whether it has, and runs in the mode in which every call takes it.
        commits: Commits that asked for a faster way than `path`, by the way: fast, length.
        commit_fallbacks: Reasons why such commits took another way, `fast: the reason`, with the number of commits.
        evidence: Tests of laws by sampling.
        excess_evidence: Why that evidence condemns the run, or None.
        predicted_ties: Invariant name to the ties that the control of its population predicts.
        routing_ties: Differences that ties between experts or columns may explain, of all cases.
        excused: Invariants with such differences, each with the number of cases; `excused_checked`: those of these
            cases in which the invariant was checked all the same.
        routed: Rule T's counts of choices of experts.
        indexed: Rule T's counts of choices of columns.
        control_errors: How far the plain decode of each prompt lies off.
        excess_error: Why those errors condemn the run, or None.
        excess_ties: Why the ties of the whole run cannot be chance (rule T's count test), or None.
        errors: Reasons why the run could not judge, one line each.
        internal: Exceptions inside the judge; a run with any is no pass.
        stopped: Why the run ended early (interrupted, time budget), or None.
        environment: Names and versions: python, torch, device, seed and so on.
        against: Value of `--against`, the reference in the oracle's place, or None for the NumPy oracle.
        reference: Value of `--reference`: what computes the oracle's formulas, `numpy` or torch on a device.
        reference_rows: The rows of such a device's, and those that NumPy certified.
        tokens_alone: Whether that reference shows tokens alone, so that no oracle ran.
        planned: What the sampling of the run was planned to see, before its first case; None where no case samples.
        speculation: Counts of drafted tokens by backends that show no acceptance.
        known: Names of known failures, each with the number of cases that showed it.
        behind: Signatures of differences after a known failure, each with the number of cases.
        passed: Ids of saved cases that the run passed over, each with the reason.
        dearest: The cases that took the most seconds to judge, with the seconds, the dearest first.
        pairs: Which pairs the judged cases had, and which they might have had; None for a run that draws no case.
        residue: What runs left in the backend's process and that changes no answer, by kind, with the first case.
        log: What the run drew, and when its workers did what.
    """

    backend: str
    emulated: bool = False
    excluded: tuple[str, ...] = ()
    varied: tuple[int, int] | None = None
    cases: int = 0
    wanted: int = 0
    open_ended: bool = False
    judged: int = 0
    differed: int = 0
    opened: bool = False
    declared: frozenset[Stage] = frozenset()
    revealed: frozenset[Stage] = frozenset()
    traces: int = 0
    replaced: int = 0
    seconds: float = 0.0
    backend_seconds: float = 0.0
    shrink_seconds: float = 0.0
    invariants: dict[str, Counts] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    ties: list[Tie] = field(default_factory=list)
    routing_ties: list[RoutingTie] = field(default_factory=list)
    excused: Counter[str] = field(default_factory=Counter)
    excused_checked: Counter[str] = field(default_factory=Counter)
    routed: RoutingCounts = field(default_factory=RoutingCounts)
    indexed: IndexingCounts = field(default_factory=IndexingCounts)
    positions: Positions = field(default_factory=Positions)
    predicted_ties: dict[str, float] = field(default_factory=dict)
    unsupported: dict[str, int] = field(default_factory=dict)
    accept_lengths: dict[int, int] = field(default_factory=dict)
    accepted_by_draft: dict[str, tuple[int, int]] = field(default_factory=dict)
    acceptance: dict[str, AcceptCounts] = field(default_factory=dict)
    attention_calls: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)
    has_kernel: bool = False
    own_kernel: bool = False
    commits: Counter[str] = field(default_factory=Counter)
    commit_fallbacks: Counter[str] = field(default_factory=Counter)
    evidence: list[Evidence] = field(default_factory=list)
    excess_evidence: str | None = None
    control_errors: list[ControlError] = field(default_factory=list)
    excess_error: str | None = None
    excess_ties: str | None = None
    errors: list[str] = field(default_factory=list)
    internal: list[InternalFailure] = field(default_factory=list)
    stopped: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    against: str | None = None
    reference: str = NUMPY
    reference_rows: CertifiedRows = field(default_factory=CertifiedRows)
    tokens_alone: bool = False
    planned: SamplingPlan | None = None
    speculation: Speculation = field(default_factory=Speculation)
    known: Counter[str] = field(default_factory=Counter)
    behind: Counter[str] = field(default_factory=Counter)
    passed: dict[str, str] = field(default_factory=dict)
    dearest: tuple[tuple[float, Case], ...] = ()
    pairs: PairCoverage | None = None
    residue: dict[str, Residue] = field(default_factory=dict)
    log: RunLog = field(default_factory=RunLog)

    def add(self, verdict: Verdict) -> None:
        """Count one judged case; what is counted anew here has its place in SUMS, LISTS, TOTALS or `absorb` too."""
        self.cases += 1
        self.log.add(verdict.case)
        self.reference_rows = self.reference_rows + verdict.reference_rows
        self.judged += verdict.judged
        self.differed += bool(verdict.findings)
        # None: the run gave no trace, so it says nothing about the declared stages.
        if verdict.revealed is not None:
            self.traces += 1
            self.revealed |= verdict.revealed
        self.backend_seconds += verdict.forward_s
        if verdict.seconds > 0:
            ordered = sorted((*self.dearest, (verdict.seconds, verdict.case)), key=lambda pair: -pair[0])
            self.dearest = tuple(ordered[:NUM_DEAREST])
        self.attention_calls += verdict.attention_calls
        self.fallbacks.update(verdict.fallbacks)
        self.commits.update(verdict.commits)
        self.commit_fallbacks.update(verdict.commit_fallbacks)
        self.ties.extend(verdict.ties)
        self.routing_ties.extend(verdict.routing_ties)
        self.routed = self.routed + verdict.routed
        self.indexed = self.indexed + verdict.indexed
        excused = {tie.invariant for tie in verdict.routing_ties}
        self.excused.update(excused)
        self.excused_checked.update(name for name in excused if verdict.outcomes.get(name) == "checked")
        self.evidence.extend(verdict.evidence)
        self.control_errors.extend(verdict.control_errors)
        self.speculation.add(verdict)
        if self.pairs is not None:
            self.pairs = self.pairs.with_case(verdict.labels)
        self.known.update(verdict.known)
        self.behind.update(verdict.behind)
        self.positions = self.positions + verdict.positions
        for name, expected in verdict.predicted_ties.items():
            self.predicted_ties[name] = self.predicted_ties.get(name, 0.0) + expected
        if verdict.unsupported is not None:
            self.unsupported[verdict.unsupported] = self.unsupported.get(verdict.unsupported, 0) + 1
        # `setdefault`: a verdict may name an invariant that has no entry yet.
        for name, outcome in verdict.outcomes.items():
            counts = self.invariants.setdefault(name, Counts())
            # A failed case counts as checked too; the statement below counts the outcome itself.
            if outcome == "failed":
                counts.checked += 1
            setattr(counts, outcome, getattr(counts, outcome) + 1)
            counts.compared += verdict.compared.get(name, 0)
        kind = verdict.case.draft.TAG
        steps, accepted = self.accepted_by_draft.get(kind, (0, 0))
        if verdict.accept_lengths:
            lengths = verdict.accept_lengths
            self.acceptance[verdict.case.id] = counts_of_lengths(lengths)
            self.accepted_by_draft[kind] = (steps + len(lengths), accepted + sum(lengths))
        elif verdict.speculated is not None:
            # Where no step is shown, positions are not known.
            speculated = verdict.speculated
            self.acceptance[verdict.case.id] = AcceptCounts((speculated.accepted,), speculated.proposed)
        for length in verdict.accept_lengths:
            self.accept_lengths[length] = self.accept_lengths.get(length, 0) + 1
        for error in {(error.invariant, error.why): error for error in verdict.internal}.values():
            self._count_internal(error, verdict)

    def _count_internal(self, error: InternalError, verdict: Verdict, cases: int = 1) -> None:
        for failure in self.internal:
            if (failure.error.invariant, failure.error.why) == (error.invariant, error.why):
                failure.cases += cases
                return
        self.internal.append(InternalFailure(error, replace(verdict, trace=None), cases))

    def counted(self) -> "Tally":
        """The counts of `add`, without what only a whole run shows, and without `pairs` and the cases of the log."""
        part = Tally(self.backend, log=RunLog(self.log.drawn))
        for name in COUNTED:
            setattr(part, name, getattr(self, name))
        part.internal = [replace(failure, saved=None) for failure in self.internal]
        return part

    def absorb(self, part: "Tally", met: int, cases: Iterable[Case]) -> None:
        """Count the cases of a part of the run as `add` would, one by one, behind those that are counted.

        Args:
            part: The counts of `add` there, as `counted` gives them.
            met: The pairs that its cases had, as bits.
            cases: Its first cases, for the log.
        """
        for name in SUMS:
            setattr(self, name, getattr(self, name) + getattr(part, name))
        for name in LISTS:
            getattr(self, name).extend(getattr(part, name))
        for name in TOTALS:
            totals = getattr(self, name)
            for key, count in getattr(part, name).items():
                totals[key] = totals.get(key, 0) + count
        self.revealed |= part.revealed
        ordered = sorted((*self.dearest, *part.dearest), key=lambda pair: -pair[0])
        self.dearest = tuple(ordered[:NUM_DEAREST])
        self.acceptance |= part.acceptance
        for kind, (steps, accepted) in part.accepted_by_draft.items():
            before = self.accepted_by_draft.get(kind, (0, 0))
            self.accepted_by_draft[kind] = (before[0] + steps, before[1] + accepted)
        self.speculation = self.speculation + part.speculation
        if self.pairs is not None:
            self.pairs = replace(self.pairs, met=self.pairs.met | met & self.pairs.possible)
        for name, counts in part.invariants.items():
            self.invariants[name] = self.invariants.get(name, Counts()) + counts
        for failure in part.internal:
            self._count_internal(failure.error, failure.verdict, failure.cases)
        self.log.absorb(part.log, cases)

    @property
    def num_asked(self) -> int:
        """Number of invariants that were asked in a case."""
        return sum(counts.turns > 0 for counts in self.invariants.values())

    @property
    def native_share(self) -> float | None:
        """The share of attention calls that took the backend's own way; None for a backend without one."""
        if not self.own_kernel or self.native_calls is None:
            return None
        return self.native_calls / self.attention_calls

    @property
    def native_calls(self) -> int | None:
        """Attention calls that took the backend's own way, in whatever mode; None for a backend without one."""
        if not self.has_kernel or not self.attention_calls:
            return None
        return native_calls(self.environment.get("mode"), self.attention_calls, self.fallbacks)

    @property
    def outcome(self) -> str:
        """`differ`; `unjudged` if nothing was judged or `errors` says why the run counts for nothing; or `agree`."""
        # A difference outranks every reason for doubt: it is the more certain fact.
        if self.failures or self.differed or self.excess_ties or self.excess_evidence or self.excess_error:
            return "differ"
        judged = sum(counts.checked for counts in self.invariants.values())
        return "unjudged" if not judged or self.errors or self.internal else "agree"

    @property
    def reasons(self) -> list[str]:
        """Every reason why the run could not judge, one line each: `errors`, and the exceptions inside the judge."""
        return [*self.errors, *(failure.line for failure in self.internal)]

    @property
    def exit_code(self) -> int:
        """0 agree, 1 differ, 3 could not judge."""
        return {"agree": 0, "differ": 1, "unjudged": 3}[self.outcome]


def nothing_fused(tally: Tally) -> str | None:
    """Why a backend with its own attention was not judged: every call fell back to another; None otherwise."""
    calls = tally.attention_calls
    reasons = tally.fallbacks
    # An attention that chooses among ways tells each choice beside the fallbacks.
    num_fallbacks = sum(count for why, count in reasons.items() if not why.startswith(CHOSEN))
    if calls and num_fallbacks >= calls and num_fallbacks == reasons.total():
        return (
            f"nothing ran fused: all {calls} attention calls fell back, so what this backend is there for did not run"
        )
    if tally.own_kernel and not calls and tally.traces:
        return "no attention call was counted, so that nobody knows whether this backend's own attention ran"
    return None


def excess_evidence(tally: Tally) -> str | None:
    """Why the tests by sampling condemn the run, or None: together their evidence is 1 / ALPHA_RUN or more."""
    log_e = run_evidence(tally.evidence)
    streams = streams_of(tally.evidence)
    if log_e < -np.log(ALPHA_RUN):
        return None
    # All together may reach the bar although no single test does.
    log_es = np.array([test.log_e for test in tally.evidence])
    names = sorted({tally.evidence[index].invariant for index in culprits(log_es)})
    strongest = streams.strongest
    if not names and strongest is not None:
        names = [f"most in {strongest.name}, e^{min(strongest.log_e, 1e6):.1f} over {strongest.draws} draws"]
    evidence = f"e^{min(log_e, 1e6):.1f}, beyond {1 / ALPHA_RUN:g}"
    culprit_names = ", ".join(names or ["no one of them alone"])
    event = "" if strongest is None else _event_of(strongest)
    return f"{len(log_es)} tests by sampling together have evidence {evidence}: {culprit_names}{event}"


def _event_of(stream: Stream) -> str:
    """The event whose bet won most in a stream of whole generations, as the end of a sentence; empty for others."""
    if stream.group is not None or not stream.name.startswith("lossless.distribution"):
        return ""
    words = describe_bet(int(np.argmax(stream.parts)))
    return f"; {words}" if words else ""
