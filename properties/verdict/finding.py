"""Finding, Tie and Verdict: facts about one case on one backend, without prose."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from specverify.properties.accepted_ranks import RankCounts
from specverify.properties.bet_group import BetGroup
from specverify.properties.resolution import Resolution
from specverify.properties.verdict.internal import InternalError
from specverify.reference.case import Case
from specverify.reference.oracle.choices import EXPERTS
from specverify.reference.trace import Array, Speculated, Stage, Trace
from specverify.reference.tree import Tree

FINISHED = "a finished run"
"""The expected value of a finding where a run broke off."""

COMPLETES = "lossless.completes"
"""The invariant of runs that break: of the case itself, and of further runs that other invariants ask for."""

ASKED_BY = "asked_by"
"""The coordinate of a finding that names the invariant whose further run broke."""

STAGE_UNKNOWN = "stage unknown"
"""The `side` in `Finding.where` if the backend could not tell in which stage the run broke."""

CONTROL = "control"
"""The `side` in `Finding.where` if the difference lies in the backend's own plain decode, the unit of rule N."""


@dataclass(frozen=True)
class Reads:
    """The row of the oracle's with which a finding compares the backend's, and the rows on whose choices it depends.

    Attributes:
        case: A case of the model that computes the row.
        context: Tokens whose rows, and those of `tree` below them, the row may read.
        tree: The tree; the row reads `context` and the path to `node`.
        node: The node; None for all nodes.
        before: The row reads the layers before this one; None for all layers.
        limit: The largest distance that the row may have.
        row: The row by an oracle; None where it shows none.
        by_head: Whether a draft head computes the row, of the target's states: the head's scores below `node`.
        attends: Whether the row is an output of attention in the layer `before`, which reads the columns chosen there.
    """

    case: Case
    context: tuple[int, ...]
    tree: Tree
    node: int | None
    before: int | None
    limit: float
    row: Callable[[Callable[[Case], Trace]], Array | None]
    by_head: bool = False
    attends: bool = False


@dataclass(frozen=True)
class Finding:
    """One difference.

    Attributes:
        stage: Where the difference shows first.
        step: Index of the speculative step, from 0.
        where: Coordinates by name, such as layer, head, node, row, column, slot, position, token.
        expected: The value that the invariant asks for: a number, a short list, a word.
        measure: The judged distance in units of its threshold, for numeric invariants; None where equality is asked.
        said: The last lines of a run that broke: frames of the traceback, the innermost last, or the last lines that
            the backend's process printed. They do not count when findings are compared.
        reads: What the judge needs in order to ask whether ties explain the difference; not kept in verdicts.
    """

    invariant: str
    stage: Stage
    step: int
    where: dict[str, int | str]
    expected: Any
    observed: Any
    measure: float | None = None
    said: tuple[str, ...] = field(default=(), compare=False)
    reads: Reads | None = field(default=None, compare=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """The finding without `reads`, whose function no other process could call."""
        return {**vars(self), "reads": None}


DRAFT_NUMBERS = frozenset({"draft.fidelity", "draft.rollback", "draft.switched"})
"""Invariants that compare the numbers of a draft model with those of the same model run from scratch."""

TARGET_ALONE = frozenset(
    f"{prefix}.{name}"
    for prefix, names in (
        ("structure", ("parent-range", "depth-consistent", "validity-closed", "ancestor-table", "mask-is-ancestry")),
        ("structure", ("positions-are-depth", "positions-on-axes", "links-walk-the-tree")),
        ("attention", ("context-exact", "order-equivariant", "subtree-removal", "padding-inert", "prefix-split")),
        ("attention", ("tree-equals-chain", "visibility-exact", "no-leakage", "columns-best", "experts-best")),
        ("cache", ("isolation", "untouched-slots", "commit-equivalence", "recurrent-rows")),
    )
    for name in names
)
"""Invariants that judge the target's forward and cache on the tree as it was drafted: no draft can make them fail."""


WHOLE_RUNS = frozenset(
    {
        "attention.batch-mate-independent",
        "lossless.deterministic",
        "lossless.draft-independent",
        "lossless.interruption-isolated",
        "lossless.schedule-independent",
        "lossless.state-isolated",
    }
)
"""Invariants that compare a run with another one as a whole: they say that something differs, and not what."""

TWO_RUNS = WHOLE_RUNS | frozenset(
    f"{prefix}.{name}"
    for prefix, names in (
        ("attention", ("order-equivariant", "subtree-removal", "padding-inert", "prefix-split", "tree-equals-chain")),
        ("attention", ("no-leakage", "page-permutation")),
        ("acceptance", ("superset-accepts-no-less", "chain-degenerate", "vocabulary-permutation")),
        ("acceptance", ("company-independent",)),
        ("cache", ("fast-equals-full", "stale-unreachable", "page-boundary", "layout-equivalent", "prefix-reuse")),
        ("serving", ("hand-over",)),
    )
    for name in names
)
"""Invariants that compare two runs of the backend, of which either may be the wrong one."""


def error_of(finding: Finding) -> str:
    """The error with which the run of a finding broke, in one line; empty for a finding of a run that ended."""
    return str(finding.observed) if finding.expected == FINISHED else ""


def width_of(finding: Finding) -> int:
    """How wide the statement of a finding is: 0 for one about a run, 1 for one about two, 2 for two whole runs."""
    return (finding.invariant in TWO_RUNS) + (finding.invariant in WHOLE_RUNS)


def attention_layer(finding: Finding) -> int:
    """The layer in whose attention the finding lies; 0 for a finding of another stage, or of no layer."""
    layer = finding.where.get("layer", 0)
    return layer if finding.stage is Stage.ATTENDED and isinstance(layer, int) else 0


def is_about_draft_numbers(finding: Finding) -> bool:
    """Whether the finding says that a draft model computes other numbers than the same model from scratch."""
    return finding.invariant in DRAFT_NUMBERS and finding.measure is not None


def is_about_target_alone(finding: Finding) -> bool:
    """Whether the finding shows the target's own forward or cache wrong, whatever the draft proposed."""
    # Some of these invariants also look at the control or at the draft's cache.
    in_target = finding.where.get("side") != CONTROL and finding.where.get("cache") != "draft"
    return finding.invariant in TARGET_ALONE and in_target and finding.expected != FINISHED


@dataclass(frozen=True)
class Tie:
    """A token other than the oracle's inside the noise of the logits (rule T): counted, reported, never a match.

    Attributes:
        position: Index in the output.
    """

    invariant: str
    position: int
    gap_sigma: float


@dataclass(frozen=True)
class RoutingTie:
    """A difference that ties of experts or columns may explain: counted, no finding.

    See `specverify.properties.verdict.routing`.

    Attributes:
        step: Index of the speculative step.
        layer: The layer of the nearest tie.
        row: The row of that tie, counted over the context and then the nodes of the tree that the difference reads.
        gap_sigma: Distance of the two scores, in the unit of `specverify.properties.verdict.followed.sigma`.
        needed: By how much the row lies beyond its limit.
        granted: By how much the oracle's row moves when tied experts and columns are exchanged: at least `needed`.
        kind: What the row of that tie chooses, of `specverify.reference.oracle.choices.KINDS`.
    """

    invariant: str
    step: int
    layer: int
    row: int
    gap_sigma: float
    needed: float = 0.0
    granted: float = 0.0
    kind: str = EXPERTS


CountsT = TypeVar("CountsT", bound="ChoiceCounts")


@dataclass(frozen=True)
class ChoiceCounts:
    """The counts of rule T over choices of one kind: a choice is that of one row in one layer.

    Attributes:
        judged: Choices that were compared with the scores of their row.
        near: Choices among them whose scores lie within the tie zone.
        predicted: Expected choices other than the oracle's, from the least noise of scores.
        ties: Choices other than the oracle's that are ties.
        worst: The widest gap of such a tie, in sigmas.
    """

    judged: int = 0
    near: int = 0
    predicted: float = 0.0
    ties: int = 0
    worst: float = 0.0

    def __add__(self: CountsT, other: CountsT) -> CountsT:
        return type(self)(
            self.judged + other.judged,
            self.near + other.near,
            self.predicted + other.predicted,
            self.ties + other.ties,
            max(self.worst, other.worst),
        )


class RoutingCounts(ChoiceCounts):
    """Counts of choices of experts."""


class IndexingCounts(ChoiceCounts):
    """Counts of choices of columns by an indexer."""


@dataclass(frozen=True)
class Positions:
    """The counts of rule T over a run: judged positions, near-ties among them, and ties that the control predicts.

    Attributes:
        near: Positions whose top two oracle logits lie within 8 sigma.
        predicted: Expected ties, from the control's noise (inflation not included).
        control_ties: Ties of the backend's own plain decode over the same positions.
    """

    judged: int = 0
    near: int = 0
    predicted: float = 0.0
    control_ties: int = 0

    def __add__(self, other: "Positions") -> "Positions":
        return Positions(
            self.judged + other.judged,
            self.near + other.near,
            self.predicted + other.predicted,
            self.control_ties + other.control_ties,
        )


@dataclass(frozen=True)
class PredictedTies:
    """Expected ties, by the control of an invariant's own population, for what it compared (inflation not included)."""

    count: float


@dataclass(frozen=True)
class Evidence:
    """One test of a law by sampling; a run is red iff the sum of its e-values reaches tests / alpha.

    Attributes:
        log_e: Natural log of the e-value when the test stopped.
        rounds: Rounds drawn; where whole generations are tested, their draws.
        smallest_tv: Smallest total variation that the test would have seen with probability .99; None for tests of
            whole generations, in which each draw has a law of its own.
        p_screen: P-value of the screen; None where there was none.
        stream: The question that the test puts to the engine at one setting; tests of one question are one stream over
            the run. Empty for a test that stands alone.
        parts: Natural logs of the e-values of the single bets whose mean the e-value is; they go on over the stream.
        resolution: What the bets of the test would have seen; None where `stream` is empty.
        groups: Bets on faults of the engine's draft, which go on over the whole run; empty where the draft's law is not
            known.
    """

    invariant: str
    log_e: float
    rounds: int
    smallest_tv: float | None = None
    p_screen: float | None = None
    stream: str = ""
    parts: tuple[float, ...] = ()
    resolution: Resolution | None = None
    groups: tuple[BetGroup, ...] = ()


@dataclass(frozen=True)
class Comparisons:
    """Comparisons that an invariant made: without one, a case is not `checked` (`specverify.properties.verdict.judge`).

    Attributes:
        count: Number of rows of arrays, tokens, numbers or laws that were compared with what they must be. What they
            must be comes from another source than the compared value itself. 0 where the evidence is there and nothing
            in it calls for a comparison.
    """

    count: int = 1


@dataclass(frozen=True)
class ControlError:
    """How far the backend's plain decode of one prompt lies off, in the unit whose law is known.

    Attributes:
        target: Digest of the target's architecture: prompts and seeds of one architecture show much the same.
        quantity: `logits` or `attended`.
        ratio: The rms error over the movement of the same rows for a change of all weights by the unit roundoff.
    """

    dtype: str
    target: str
    quantity: str
    ratio: float


@dataclass(frozen=True)
class CertifiedRows:
    """The rows of logits and attention outputs that a reference on a device computed, and those that NumPy certified.

    Attributes:
        judged: Rows of the reference's runs, a row for each node of each step.
        certified: Rows among them that NumPy computed again, within the bound.
        widest: The largest difference between the two, over the largest number of its row.
    """

    judged: int = 0
    certified: int = 0
    widest: float = 0.0

    def __add__(self, other: "CertifiedRows") -> "CertifiedRows":
        return CertifiedRows(
            self.judged + other.judged, self.certified + other.certified, max(self.widest, other.widest)
        )


Outcome = str
"""Outcome of one invariant on one case: checked (it compared something), failed, internal (it raised an exception, so
that nothing is known), unobserved, or not_applicable."""


@dataclass(frozen=True)
class RunFacts:
    """Facts of a run without its numbers.

    Attributes:
        tokens: The output; of a session, that of request 0.
        nodes: Drafted nodes of each tree, without its root; empty where the run does not show its trees.
        height: Levels below the root of each tree.
        emitted: Tokens that each step brought.
        paths: Accepted rows of each tree, from the root on.
        draft_calls: Forwards of the draft; None where the run does not count them.
    """

    tokens: tuple[int, ...]
    nodes: tuple[int, ...] = ()
    height: tuple[int, ...] = ()
    emitted: tuple[int, ...] = ()
    paths: tuple[tuple[int, ...], ...] = ()
    draft_calls: int | None = None


def run_facts(trace: Trace) -> RunFacts:
    """The facts of the run that `trace` shows."""
    trees = [step.drafted.tree for step in trace.steps if step.drafted is not None]
    return RunFacts(
        tuple(trace.output),
        tuple(len(tree) - 1 for tree in trees),
        tuple(tree.height for tree in trees),
        tuple(len(step.emitted.tokens) for step in trace.steps if step.emitted is not None),
        tuple(tuple(step.accepted.path) for step in trace.steps if step.accepted is not None),
        None if trace.accounting is None else trace.accounting.draft_calls,
    )


@dataclass(frozen=True)
class Verdict:
    """The result of one case on one backend.

    Attributes:
        outcomes: Invariant name to outcome; `failed` implies that the invariant was checked.
        compared: Invariant name to number of comparisons, for invariants that were checked or failed.
        findings: Every difference, in the order of the invariants.
        ties: Rule T's ties.
        routing_ties: Rule T's ties between experts or columns that are not shown, each in the place of a finding.
        predicted_ties: Invariant name to the ties that the control of its population predicts.
        routed: Rule T's counts of choices of experts.
        indexed: Rule T's counts of choices of columns.
        positions: Rule T's counts.
        evidence: Tests of laws by sampling.
        control_errors: How far the plain decode of each prompt lies off, for the test of the whole run.
        trace: The backend's trace of the case, or None when the run failed.
        unsupported: Why the backend declined the case, or a backend in the oracle's place had no answer; or None.
        seconds: Seconds in which the case was judged: engine, reference and comparisons.
        forward_s: Seconds that the backend spent in its forwards for this case and its variants.
        attention_calls: Calls of attention for this case and its variants, one for each layer of each forward; 0 where
            they are not counted.
        fallbacks: Each reason why attention took a slower path than the backend's own, with the number of calls.
        commits: Commits of this case and its variants that asked for a way of `subject.FASTER`, by the way.
        commit_fallbacks: Reasons why such commits took another way, `fast: the reason`, with the number of commits.
        accept_lengths: Accepted drafted tokens of each step.
        ranks: For each kind of draft, its nodes below accepted parents and its accepted nodes, by depth and rank.
        revealed: Stages that the trace of the case holds, or None where there is no trace.
        speculated: Counts of drafted tokens, where the backend tells them beside its stages.
        known: Names of the known failures that the case showed; their findings are not among `findings`.
        behind: Signatures of differences after a known failure, which may be its consequences.
        run: What the run did, for the record of a run that keeps one.
        labels: What each request of the case has and reached (`specverify.properties.verdict.coverage`), as places in
            LABELS there.
        internal: Exceptions inside the judge. A case that shows any is no pass, whatever other invariants say of it.
        reference_rows: The rows of a reference on a device; none where NumPy itself is the reference.
    """

    case: Case
    backend: str
    outcomes: dict[str, Outcome]
    findings: tuple[Finding, ...] = ()
    ties: tuple[Tie, ...] = ()
    routing_ties: tuple[RoutingTie, ...] = ()
    routed: RoutingCounts = field(default_factory=RoutingCounts)
    indexed: IndexingCounts = field(default_factory=IndexingCounts)
    positions: Positions = field(default_factory=Positions)
    predicted_ties: Mapping[str, float] = field(default_factory=dict)
    evidence: tuple[Evidence, ...] = ()
    control_errors: tuple[ControlError, ...] = ()
    trace: Trace | None = None
    unsupported: str | None = None
    seconds: float = 0.0
    forward_s: float = 0.0
    attention_calls: int = 0
    fallbacks: Mapping[str, int] = field(default_factory=dict)
    accept_lengths: tuple[int, ...] = ()
    ranks: Mapping[str, RankCounts] = field(default_factory=dict)
    revealed: frozenset[Stage] | None = None
    speculated: Speculated | None = None
    compared: Mapping[str, int] = field(default_factory=dict)
    commits: Mapping[str, int] = field(default_factory=dict)
    commit_fallbacks: Mapping[str, int] = field(default_factory=dict)
    known: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()
    run: RunFacts | None = None
    labels: tuple[tuple[int, ...], ...] = ()
    internal: tuple[InternalError, ...] = ()
    reference_rows: CertifiedRows = CertifiedRows()

    @property
    def judged(self) -> bool:
        """Whether at least one invariant was checked."""
        return any(outcome in ("checked", "failed") for outcome in self.outcomes.values())

    @property
    def agreed(self) -> bool:
        """Whether nothing differed; says nothing about stages that were not observed."""
        return not self.findings

    @property
    def first(self) -> Finding | None:
        """The finding nearest to the fault: that of the earliest step, then the earliest stage, then the narrowest.

        A finding about a control comes last: the control is another run than the case's, and its stage says nothing
        about this one. Wrong numbers of a draft model give way to a finding about the target alone. Every step is
        judged on the tree as the draft proposed it, so the draft cannot cause both findings; code that draft and target
        share can. Of findings in attention that of the earliest layer counts: what the next layer chooses follows from
        it.
        """
        nearest = min(
            self.findings,
            key=lambda finding: (
                finding.where.get("side") == CONTROL,
                finding.step,
                finding.stage,
                width_of(finding),
                attention_layer(finding),
            ),
            default=None,
        )
        if nearest is None or not is_about_draft_numbers(nearest):
            return nearest
        # The draft's numbers are wrong: prefer a finding that the draft cannot have caused.
        shared = (finding for finding in self.findings if is_about_target_alone(finding))
        return min(shared, key=lambda finding: (finding.step, finding.stage, attention_layer(finding)), default=nearest)
