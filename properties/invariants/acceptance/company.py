"""Acceptance in company: others, a setting or overlap change neither a draft nor what is accepted.

Speculation that is wrong in a batch alone leaves every token right and is slow: the draft reads another request's
state, its positions are off where two requests run, or under overlap it reads the token of the step before. The same
request alone is the measure, so that no draft need be known.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from specverify.properties.generations import DOUBT, RUN_TESTS, with_seeds
from specverify.properties.invariants.acceptance.counts import rates_of
from specverify.properties.invariants.draft.proposals import compare_proposal
from specverify.properties.invariants.two_runs import has_session
from specverify.properties.laws.cut_chains import is_possible
from specverify.properties.laws.paired_counts import PairedCounts
from specverify.properties.laws.sampled.gate import log_bar
from specverify.properties.verdict.finding import Comparisons, Evidence, Finding
from specverify.properties.verdict.invariant import Fact, Invariant, NotApplicable, Oracle, Unobserved, needing
from specverify.properties.verdict.session_members import Member, members
from specverify.properties.verdict.subject import Subject
from specverify.properties.verdict.variants import dice, pending_root
from specverify.reference.abilities import Abilities
from specverify.reference.case import Case
from specverify.reference.malformed import Malformed
from specverify.reference.trace import Speculated, Stage, Step, Trace

NAME = "acceptance.company-independent"

EVERY = 6
"""Sessions among which one is judged: each of its requests runs alone, and sampled ones several times."""

PAIRS, PAIRS_IN_DOUBT = 16, 96
"""Pairs of runs of sampled requests that are tested, and the most where the evidence is beyond DOUBT."""

FURTHER = 6
"""Sessions on other prompts among which a second difference is looked for, as the first may be a tie of the draft."""

NO_PROMISE = "requests in company draft otherwise, and the engine promises nothing (`chains`, `own_drafts`)"
"""The reason where the batch may decide what is drafted."""

OTHER_CHAINS = "requests in company are drafted for with fewer or shorter chains"
"""The reason where counts are those of a right draft whose chains were cut."""

Coordinates = dict[str, int | str]


@dataclass
class Comparison:
    """Results of comparing the requests of a session with themselves alone.

    Attributes:
        compared: Drafted tokens of runs that were compared; None where no request could be.
        findings: The differences.
        gap: Why a request could not be compared although others change nothing of what it drafts; empty if all were.
    """

    compared: int | None = None
    findings: list[Finding] = field(default_factory=list)
    gap: str = ""

    def count(self, drafted_tokens: int) -> None:
        """Take a comparison of so many drafted tokens."""
        self.compared = (self.compared or 0) + drafted_tokens


def company_independent(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Each request drafts and accepts in company what it does alone, where both runs draft alike.

    Greedy requests with equal texts accept the same tokens; a request whose text differs is left to other invariants.
    An engine that shows counts alone has to promise chains or drafts by a request's own text. Where requests sample,
    the shares that they accept are tested in pairs of runs. A difference in float32 that a tie of the draft may explain
    is none: the oracle knows the ties of a draft model, and elsewhere a second session has to differ too.

    Raises:
        NotApplicable: The dtype has 16 bits, in which rounding moves many choices of a draft, and no tree is shown.
        Unobserved: Counts or trees are not shown, or requests in company propose another number of tokens.
    """
    assert case.session is not None
    if case.dtype not in ("float32", "float64") and (case.session.continuous or not _knows_draft(case, subject)):
        raise NotApplicable("16 bits")
    comparison = _compare(case, oracle, subject)
    may_be_tied = case.dtype == "float32" and not _knows_draft(case, subject)
    if comparison.findings and may_be_tied and not _differs_again(case, oracle, subject):
        comparison = Comparison(comparison.compared, gap="a difference that may be a tie of the draft")
    yield from comparison.findings
    is_compared = comparison.compared is not None
    if is_compared:
        yield Comparisons(comparison.compared or 0)
    gap = comparison.gap
    if case.session.continuous and not comparison.findings:
        for fact in _sampled(case, subject):
            if isinstance(fact, str):
                gap = gap or fact
            else:
                is_compared = True
                yield fact
    if gap:
        raise Unobserved(gap)
    if not is_compared:
        raise NotApplicable("no request drafts, runs to its end and has the text that it has alone")


def _compare(case: Case, oracle: Oracle, subject: Subject) -> Comparison:
    """The comparison of the greedy requests."""
    assert case.session is not None
    trace = subject(case)
    if trace.shared is None:
        raise Unobserved("the trace does not say what the requests of the session did")
    comparison = Comparison()
    if case.session.continuous:
        for number in uncancelled_requests(case, trace):
            if case.alone(number).sampling.greedy:
                _compare_counts(comparison, case, number, oracle, subject)
    else:
        for member in members(case, trace):
            if member.alone.sampling.greedy:
                _compare_steps(comparison, member, oracle, subject)
    return comparison


def uncancelled_requests(case: Case, trace: Trace) -> list[int]:
    """The requests of a session that entered and were not cancelled."""
    assert case.session is not None
    assert trace.shared is not None
    cancelled = {number for action in case.session.actions if action.kind == "cancel" for number in action.requests}
    return [number for number, run in enumerate(trace.shared.requests) if run is not None and number not in cancelled]


@dataclass(frozen=True)
class Run:
    """The counts of a request's run, and the number of tokens of its text."""

    tokens: int
    counts: Speculated

    @property
    def steps(self) -> int:
        """The steps that gave the text: each has one token of the target's beside the accepted ones."""
        return max(self.tokens - self.counts.accepted, 0)

    @property
    def by_position(self) -> tuple[int, ...]:
        """`Speculated.by_position` up to the last place that is not 0."""
        return self.counts.by_position[: sum(count > 0 for count in self.counts.by_position)]

    def missing(self, length: int) -> int:
        """Drafted tokens that chains of `length` in each step lack; below 0 where accepted tokens were cut."""
        return length * self.steps - self.counts.proposed

    @property
    def words(self) -> str:
        """The accepted tokens of the drafted ones, and the places where they were accepted, in words."""
        places = f", by position {list(self.by_position)}" if self.by_position else ""
        return f"{self.counts.accepted} of {self.counts.proposed}{places}"


def run_of(trace: Trace) -> Run | None:
    """The counts of a trace; None where it tells none."""
    return None if trace.speculated is None else Run(len(trace.output), trace.speculated)


def difference(alone: Run, beside: Run) -> str:
    """How the run beside others accepts otherwise, in words; empty where it accepts as many tokens at each place."""
    accepted = alone.counts.accepted, beside.counts.accepted
    if accepted[0] != accepted[1]:
        return f"{'less' if accepted[1] < accepted[0] else 'more'} is accepted"
    # Without accepted tokens there may be nothing to tell by position.
    tell_places = bool(alone.by_position and beside.by_position)
    return "as much is accepted at other places" if tell_places and alone.by_position != beside.by_position else ""


def _company(case: Case) -> str:
    assert case.session is not None
    setting = case.session.setting
    words = ["beside other requests"] if case.session.mates else []
    return ", ".join([*words, *([f"in the setting {setting}"] if setting else [])]) or "in a session"


def _compare_counts(comparison: Comparison, case: Case, number: int, oracle: Oracle, subject: Subject) -> None:
    """Compare the counts of request `number` with those of the same request alone, where both have one text."""
    shared = subject(case).shared
    assert shared is not None
    trace = shared.requests[number]
    alone_trace = subject(case.alone(number))
    if trace is None or trace.output != alone_trace.output or not trace.output:
        return
    beside, alone = run_of(trace), run_of(alone_trace)
    if beside is None or alone is None:
        comparison.gap = "no run tells how many drafted tokens it accepted"
        return
    if not alone.counts.proposed and not beside.counts.proposed:
        return
    side = difference(alone, beside)
    if side or alone.counts.proposed != beside.counts.proposed:
        gap = _excuse(case, number, oracle, subject, bool(side), (alone_trace, trace))
        if gap:
            comparison.gap = gap
            return
        if not side:
            side = f"{'fewer' if beside.counts.proposed < alone.counts.proposed else 'more'} tokens are drafted"
        where: Coordinates = {"request": number, "side": f"{side} {_company(case)}"}
        comparison.findings.append(Finding(NAME, Stage.ACCEPTED, 0, where, alone.words, beside.words))
    comparison.count(beside.counts.proposed)


def _knows_draft(case: Case, subject: Subject) -> bool:
    """Whether the oracle can tell the draft's ties: of shown trees, or of chains of a draft model's best tokens."""
    within = subject.abilities
    assert case.session is not None
    if not case.session.continuous:
        return _knows_trees(subject)
    return within is not None and within.chains is not None and case.draft.model is not None


def owes_equal_drafts(case: Case, within: Abilities) -> bool:
    """Whether the engine promises drafts by a request's own text in the setting of the session."""
    assert case.session is not None
    return within.own_drafts and case.session.setting not in within.cutting_settings


def _excuse(
    case: Case, number: int, oracle: Oracle, subject: Subject, accepts_otherwise: bool, traces: tuple[Trace, Trace]
) -> str:
    """Why a right draft may give the counts of both traces, of one text; empty where it may not.

    An engine that promises drafts by a request's own text owes equal counts. One that names the length of its chains
    may cut chains, or go without some: the counts are then possible for the draft model's tokens on the text. Without
    either, the size of a batch or the texts of others may decide what is drafted.
    """
    within = subject.abilities
    assert within is not None
    if owes_equal_drafts(case, within):
        return ""
    alone = case.alone(number)
    if within.chains is None or alone.draft.model is None:
        return OTHER_CHAINS if within.own_drafts else NO_PROMISE
    if not accepts_otherwise:
        return OTHER_CHAINS
    rates = rates_of(alone, oracle, subject, within.chains, traces[0])
    if (rates.low != rates.high).any():
        return "two best tokens of the draft are a tie"
    length = within.chains.tokens
    counts = [trace.speculated for trace in traces if trace.speculated is not None]
    return OTHER_CHAINS if all(is_possible(rates.high > 0, length, run_counts) for run_counts in counts) else ""


def _differs_again(case: Case, oracle: Oracle, subject: Subject) -> bool:
    """Whether the session differs on other prompts too, on which the same tie is unlikely."""
    return any(_compare(other, oracle, subject).findings for other in _on_other_prompts(case))


def _on_other_prompts(case: Case) -> Iterator[Case]:
    """The session with other prompts of the same lengths, several times."""
    assert case.session is not None
    rng = dice(case, "company")

    def other_prompt(prompt: Sequence[int]) -> tuple[int, ...]:
        return tuple(rng.integers(0, case.model.vocab_size, size=len(prompt)).tolist())

    for _ in range(FURTHER):
        prompts = [other_prompt(prompt) for prompt in (case.prompt, *(mate.prompt for mate in case.session.mates))]
        mates = tuple(
            replace(mate, prompt=prompt) for mate, prompt in zip(case.session.mates, prompts[1:], strict=True)
        )
        with suppress(Malformed):  # a script begins with its prompt's last token
            yield replace(case, prompt=prompts[0], session=replace(case.session, mates=mates))


def _compare_steps(comparison: Comparison, member: Member, oracle: Oracle, subject: Subject) -> None:
    """Compare the steps of a request with those of the same request alone, up to the first that accepts otherwise.

    Requests that learn from others, or switch drafts, are left out: alone they draft something else.
    """
    if member.unknown:
        comparison.gap = "the trace does not tell what the drafts of a request had to propose"
    if member.retold:
        return
    for number, (step, twin) in enumerate(zip(member.trace.steps, subject(member.alone).steps, strict=False)):
        if not (_shows_counts(step) and _shows_counts(twin)):
            comparison.gap = "the trace does not show what is drafted, accepted and emitted"
            return
        assert step.drafted is not None
        assert twin.drafted is not None
        assert step.accepted is not None
        assert twin.accepted is not None
        if step.context != twin.context or number in member.bare:
            return
        if step.drafted.tree.parent != twin.drafted.tree.parent:
            comparison.gap = "a request in company proposes a tree of another form"
            return
        if not _agree(step, twin):
            return
        lengths = len(twin.accepted.path) - 1, len(step.accepted.path) - 1
        if lengths[0] != lengths[1]:
            if _knows_trees(subject) and not _is_wrong(member, oracle, subject, number, step, twin):
                comparison.gap = "two best tokens of the draft are a tie"
                return
            side = f"{'less' if lengths[1] < lengths[0] else 'more'} is accepted beside other requests"
            drafted_tokens = len(step.drafted.tree) - 1
            expected, observed = (f"{length} of {drafted_tokens}" for length in lengths)
            where: Coordinates = {"request": member.number, "side": side}
            comparison.findings.append(Finding(NAME, Stage.ACCEPTED, number, where, expected, observed))
            comparison.count(drafted_tokens)
            return
        comparison.count(len(step.drafted.tree) - 1)


def _knows_trees(subject: Subject) -> bool:
    return subject.abilities is None or bool(subject.abilities.drafts)


def _shows_counts(step: Step) -> bool:
    return step.drafted is not None and step.accepted is not None and step.emitted is not None


def _agree(step: Step, twin: Step) -> bool:
    """Whether the tokens that one of the steps emitted are the first of those of the other."""
    assert step.emitted is not None
    assert twin.emitted is not None
    return all(token == other for token, other in zip(step.emitted.tokens, twin.emitted.tokens, strict=False))


def _is_wrong(member: Member, oracle: Oracle, subject: Subject, number: int, step: Step, twin: Step) -> bool:
    """Whether the two steps, which accept otherwise, have one tree, or a tree that is not what the draft gives."""
    assert step.drafted is not None
    assert twin.drafted is not None
    if step.drafted.tree == twin.drafted.tree:
        return True
    pending = step.drafted.tree.token[0]
    with suppress(Unobserved):
        pending = pending_root(member.alone, subject, number)
    return any(
        isinstance(fact, Finding)
        for drafted_step in (step, twin)
        for fact in compare_proposal(NAME, member.alone, oracle, number, drafted_step, number, pending)
    )


def _sampled(case: Case, subject: Subject) -> Iterator[Fact | str]:
    """Test whether sampled requests accept by one law in company and alone, in pairs of runs on seeds of their own.

    The last value is a reason, in words, where pairs could not be compared.
    """
    assert case.session is not None
    within = subject.abilities
    assert within is not None
    if all(case.alone(number).sampling.greedy for number in range(1 + len(case.session.mates))):
        return
    if not owes_equal_drafts(case, within) and within.chains is None:
        yield OTHER_CHAINS if within.own_drafts else NO_PROMISE
        return
    runs = list[tuple[Run, Run]]()
    for tries, (alone_trace, trace) in enumerate(_sampled_runs(case, subject), 1):
        alone, beside = run_of(alone_trace), run_of(trace)
        if alone is None or beside is None:
            yield "no run tells how many drafted tokens it accepted"
            return
        if alone.tokens and beside.tokens and (alone.counts.proposed or beside.counts.proposed):
            runs.append((alone, beside))
        if tries % PAIRS == 0:
            log_e = _pairs_of(runs, case, within).log_e
            # More is asked where there is doubt: an e-value may be stopped by whatever came before.
            if log_e < DOUBT or log_e >= log_bar(RUN_TESTS) or tries >= PAIRS_IN_DOUBT:
                break
    pairs = _pairs_of(runs, case, within)
    if len(pairs):
        yield Evidence(NAME, pairs.log_e, len(pairs))
        yield Comparisons(len(pairs))
        yield from _law_finding(case, pairs)
    elif runs:
        yield OTHER_CHAINS


def _sampled_runs(case: Case, subject: Subject) -> Iterator[tuple[Trace, Trace]]:
    """Runs of the sampled requests, alone and in company, each on a seed of its own.

    On one seed the two runs of a pair would depend on each other, and could not trade places.
    """
    assert case.session is not None
    rng = dice(case, "sampled company")
    for _ in range(PAIRS_IN_DOUBT):
        beside_seeds, alone_seeds = rng.integers(0, 2**62, size=(2, 1 + len(case.session.mates))).tolist()
        trace = subject(with_seeds(case, beside_seeds))
        alone_session = with_seeds(case, alone_seeds)
        sampled = [number for number in uncancelled_requests(case, trace) if not case.alone(number).sampling.greedy]
        if trace.shared is None or not sampled:
            return
        for number in sampled:
            request_trace = trace.shared.requests[number]
            if request_trace is not None:
                yield subject(alone_session.alone(number)), request_trace


def _pairs_of(runs: Sequence[tuple[Run, Run]], case: Case, within: Abilities) -> PairedCounts:
    """The pairs of which both runs drafted whole chains in each step, as far as totals can tell.

    The runs alone show whether the engine drafts for the first token of a text, and whether it cuts chains at the end.
    """
    length = 0 if owes_equal_drafts(case, within) or within.chains is None else within.chains.tokens
    most_missing, is_cut = 0, False
    if length:
        is_cut = any(alone.counts.proposed % length for alone, _ in runs)
        # Beside one token of the target's, chains at the end have room for length, ..., 2, 1 tokens too few.
        at_end = length * (length + 1) // 2 if is_cut else 0
        most_missing = at_end + (length if any(alone.missing(length) > at_end for alone, _ in runs) else 0)
    pairs = PairedCounts()
    for pair in runs:
        is_whole = not length or all(
            run.missing(length) <= most_missing and (is_cut or not run.counts.proposed % length) for run in pair
        )
        if is_whole:
            alone, beside = pair
            counts = [alone.counts.accepted, *alone.by_position], [beside.counts.accepted, *beside.by_position]
            pairs.add(counts, (alone.steps, beside.steps), (alone.counts.proposed, beside.counts.proposed))
    return pairs


def _law_finding(case: Case, pairs: PairedCounts) -> Iterator[Finding]:
    """A finding at the first place whose evidence alone would condemn a run."""
    log_es = pairs.log_es
    bar = log_bar(RUN_TESTS) + float(np.log(len(log_es)))
    # A draft that is wrong at a place is the likelier cause than one that is wrong at all of them.
    for place in sorted(log_es, key=lambda place: (place < 0, place)):
        if log_es[place] >= bar:
            alone, beside = pairs.accepted[place]
            side = "less" if beside * pairs.tried[0] < alone * pairs.tried[1] else "more"
            position = f" at position {place + 1}" if place >= 0 else ""
            where: Coordinates = {"side": f"{side} is accepted{position} {_company(case)}"}
            expected, observed = (
                f"{accepted} in {steps} steps" for accepted, steps in zip((alone, beside), pairs.tried, strict=True)
            )
            yield Finding(NAME, Stage.ACCEPTED, 0, where, expected, observed)
            return


INVARIANTS = (
    Invariant(
        NAME,
        "A request's draft is accepted beside others, in each setting and under overlap as it is alone.",
        needing(Stage.EMITTED),
        company_independent,
        has_session,
        every=EVERY,
        speaks_of="session",
    ),
)
