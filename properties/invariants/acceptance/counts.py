"""Counts of accepted tokens: an engine accepts as many as target and draft give on its text.

Speculation that is wrong in its draft alone, such as a stale draft cache, leaves every token right and is slow. Where
the draft is a known model and the engine says how it drafts (`specverify.reference.abilities.Chains`), the law of the
counts is known as well.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from specverify.properties.generations import FULL_EFFORT, RUN_TESTS, requests_of
from specverify.properties.invariants.draft.scores import DRAFT_K, draft_sigma
from specverify.properties.laws.accepted_counts import (
    Addend,
    Rates,
    expected_lengths,
    log_evidence_of,
    log_moments,
    possible_counts,
)
from specverify.properties.laws.draw_by_draw import Point, logit_bound, points
from specverify.properties.laws.sampled.gate import log_bar
from specverify.properties.tolerance.closeness import forced_logits, noise
from specverify.properties.tolerance.ties import is_decided
from specverify.properties.verdict.finding import Comparisons, Evidence, Finding
from specverify.properties.verdict.invariant import TURNS, Fact, Invariant, NotApplicable, Oracle, Unobserved, needing
from specverify.properties.verdict.subject import Subject
from specverify.reference.abilities import Chains
from specverify.reference.case import Case
from specverify.reference.sampling import Sampling
from specverify.reference.trace import Array, Speculated, Stage, Trace

NAME = "acceptance.rate"


def accepted_counts(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """The accepted tokens of the case's generations, in all and by position, are as many as their texts give.

    Greedy counts are certain but for near ties of the draft. Sampled ones are tested over as many generations as
    `lossless.distribution` asks for, by an e-value whose evidence the gate of the run counts.

    Raises:
        NotApplicable: The dtype has 16 bits, in which rounding moves many choices of a draft.
        Unobserved: No run tells its counts.
    """
    assert subject.abilities is not None
    chains = subject.abilities.chains
    assert chains is not None
    if case.dtype not in ("float32", "float64"):
        raise NotApplicable("16 bits")
    totals = Counts(chains)
    for alone, trace in (
        requests_of(case, subject, FULL_EFFORT) if not case.sampling.greedy else [(case, subject(case))]
    ):
        if trace.speculated is not None and trace.output:
            totals.add(trace.speculated, rates_of(alone, oracle, subject, chains, trace))
        if totals.tokens >= FULL_EFFORT.tokens:
            break
    if not totals.tokens:
        raise Unobserved("no run tells how many drafted tokens it accepted")
    yield Comparisons(totals.tokens)
    questions = totals.questions()
    log_es = np.array([question.log_e for question in questions])
    yield Evidence(NAME, float(np.logaddexp.reduce(log_es) - np.log(len(log_es))), totals.tokens)
    bar = log_bar(RUN_TESTS) + float(np.log(len(questions)))
    if log_es.max() >= bar:
        # A draft that is wrong at a position is the likelier cause than one that is wrong at all of them.
        yield next(question for question in questions if question.log_e >= bar).finding(bar)


@dataclass(frozen=True)
class Question:
    """A count of accepted tokens, and the tries among which it is counted.

    Attributes:
        place: The drafted token of a chain, from 0; None for all tokens.
        tried: Chains that accepted all tokens before. For the first token of a chain, tokens that the target gave of
            itself, one in each step: engines that draft fewer tokens at the end of a text do not tell their chains. For
            all tokens, the drafted ones.
        accepted: How many of the tries were accepted.
        share: The share that target and draft give on these texts, by which tries are weighed; 0 for all tokens.
        moments: `log_moments` of the accepted tokens less the share of the tries.
    """

    place: int | None
    tried: int
    accepted: int
    share: float
    moments: Array

    @property
    def log_e(self) -> float:
        """Log of the e-value that the draft is another one."""
        return log_evidence_of(self.accepted - self.share * self.tried, self.moments)

    def finding(self, bar: float) -> Finding:
        """The finding that this count lies outside those whose evidence is below `bar`."""
        largest = max(self.tried, 0) + self.accepted
        least, most = possible_counts(self.moments, self.share * self.tried, largest, bar)
        position = "" if self.place is None else f" at position {self.place + 1}"
        side = (
            f"the draft is degraded{position}" if self.accepted < least else f"more is accepted{position} than can be"
        )
        expected = str(least) if least == most else f"{least} to {most}"
        return Finding(NAME, Stage.ACCEPTED, 0, {"side": side, "tried": max(self.tried, 0)}, expected, self.accepted)


class Counts:
    """The counts of generations beside what their texts give.

    Attributes:
        tokens: Tokens of all texts.
    """

    def __init__(self, chains: Chains) -> None:
        self.tokens = 0
        self._length = chains.tokens
        self._rates: list[Rates] = []
        self._counts: list[Speculated] = []

    def add(self, counts: Speculated, rates: Rates) -> None:
        """Take one generation."""
        self.tokens += len(rates.low)
        self._rates.append(rates)
        self._counts.append(counts)

    def questions(self) -> list[Question]:
        """A question for each place of a chain, where the engine tells counts by position; then one for all tokens."""
        proposed = sum(counts.proposed for counts in self._counts)
        accepted = sum(counts.accepted for counts in self._counts)
        whole = Question(None, proposed, accepted, 0.0, self._moments(lambda length, _: length))
        # Without accepted tokens there may be nothing to tell by position.
        if any(counts.accepted and not counts.by_position for counts in self._counts):
            return [whole]
        expected = np.sum([expected_lengths(rates, self._length) for rates in self._rates], axis=0)
        padding = (0,) * self._length
        by_position = np.sum([(*counts.by_position, *padding)[: self._length] for counts in self._counts], axis=0)
        # Below 0 where more was accepted behind the end of texts than the target gave of itself.
        reached = [self.tokens - accepted, *map(int, by_position)]
        return [*(self._question_at(place, reached, expected) for place in range(self._length)), whole]

    def _question_at(self, place: int, reached: list[int], expected: Array) -> Question:
        share = float(expected[place + 1] / expected[place]) if expected[place] else 0.0
        if place:
            moments = self._moments(lambda length, _: float(length > place) - share * float(length >= place))
        else:
            moments = self._moments(lambda length, tokens: float(length > 0) - share * (tokens - length))
        return Question(place, reached[place], reached[place + 1], share, moments)

    def _moments(self, addend: Addend) -> Array:
        moments: Array = sum((log_moments(rates, self._length, addend) for rates in self._rates), start=np.zeros(()))
        return moments


def rates_of(case: Case, oracle: Oracle, subject: Subject, chains: Chains, trace: Trace) -> Rates:
    """The probability that a drafted token was accepted at each place of the output of `trace`."""
    assert case.draft.model is not None
    drafting_case = case.drafting_case
    rows = forced_logits(drafting_case, oracle, trace.output)
    sigma = draft_sigma(case, rows)
    if case.sampling.greedy or chains.choice == "best":
        hits = rows.argmax(axis=1) == np.array(trace.output)
        decided = np.array([is_decided(row, sigma) for row in rows])
        return Rates((hits & decided).astype(float), (hits | ~decided).astype(float))
    if chains.choice == "tempered":
        drafting_case = replace(drafting_case, sampling=Sampling(case.sampling.temperature, seed=case.sampling.seed))
    widest = DRAFT_K * sigma * float(np.sqrt(rows.shape[1]))
    proposal = _bounds(points(drafting_case, oracle, trace, widest), trace)
    if chains.rule == "match":
        return Rates(*proposal)
    target = _bounds(points(case, oracle, trace, logit_bound(case, noise(case, oracle, subject))), trace)
    with np.errstate(divide="ignore", invalid="ignore"):
        low, high = proposal[0] / target[1], proposal[1] / target[0]
    # A token that the target may not have given tells nothing; other invariants find it.
    return Rates(np.minimum(np.nan_to_num(low, nan=0.0), 1.0), np.minimum(np.nan_to_num(high, nan=1.0), 1.0))


def _bounds(law_points: list[Point], trace: Trace) -> tuple[Array, Array]:
    """The least and the largest probability of each token of the output."""
    pairs = list(zip(law_points, trace.output, strict=True))
    return (
        np.array([point.low[token] for point, token in pairs]),
        np.array([point.high[token] for point, token in pairs]),
    )


def _has_draft_model(case: Case) -> bool:
    return case.draft.model is not None and case.session is None


INVARIANTS = (
    Invariant(
        NAME,
        "Where the engine says how it drafts, it accepts as many drafted tokens as target and draft give on its text.",
        needing(Stage.EMITTED),
        accepted_counts,
        _has_draft_model,
        every=TURNS,
        promise="chains",
    ),
)
