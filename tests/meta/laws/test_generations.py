"""Whole generations: arg-max under sampling and a neighbour's coins are seen by the request path, whatever is shown."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from specverify.backends.base import Declaration
from specverify.backends.compositions import open_cpu
from specverify.backends.faults import fault_named
from specverify.properties.generations import FULL_EFFORT, RUN_TESTS, SMALL_EFFORT, Neighbours, generation_evidence
from specverify.properties.invariants.lossless import distribution as module
from specverify.properties.invariants.lossless.distribution import distribution
from specverify.properties.laws.sampled.gate import log_bar
from specverify.properties.strategies.models import GALLERY
from specverify.properties.verdict.finding import Comparisons, Evidence, Finding
from specverify.properties.verdict.invariant import Fact
from specverify.properties.verdict.subject import Subject
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel
from specverify.reference.rules import Rule
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.trace import Stage, Step, Trace
from specverify.reference.tree import RankTree
from specverify.setup.subjects import subject_of
from tests.corruption import ORACLE, subject_with_fault

WIDE = GALLERY[7]
CASE = Case(
    Seeded(WIDE, 0),
    (3, 1, 4),
    LanguageModel(Seeded(WIDE, 1), RankTree((0, 0, 0, 1), (0, 0, 1, 0))),
    sampling=Sampling(2.5, draws="without-replacement"),
    stops=Stops(6),
)
FAULT = "sampled-request-by-arg-max"


class Terse:
    """A stranger that decodes with our engine and shows its output alone, of every request of a session.

    `temperature` is put in place of the one asked for, and `shared` gives each mate of a session the first one's seed;
    `frozen` gives every run the same.
    """

    def __init__(self, temperature: float | None = None, shared: bool = False, frozen: bool = False) -> None:
        self._inner = open_cpu()
        declaration = self._inner.declaration
        self.declaration: Declaration = replace(
            declaration, name="terse", reveals=frozenset({Stage.EMITTED}), takes_tape=False
        )
        self._temperature, self._shared, self._frozen = temperature, shared, frozen
        if frozen:
            self.declaration = replace(self.declaration, sessions=False)

    def run(self, case: Case) -> Trace:
        """Run the case, as it takes it, and hide the rest."""
        case = replace(case, sampling=self._sampling_of(case.sampling))
        if case.session is not None:
            seed = case.sampling.seed
            mates = tuple(replace(mate, sampling=self._sampling_of(mate.sampling, seed)) for mate in case.session.mates)
            case = replace(case, session=replace(case.session, mates=mates))
        trace = self._inner.run(case)
        if trace.shared is None:
            return _bare(trace)
        shared = replace(trace.shared, requests=tuple(request and _bare(request) for request in trace.shared.requests))
        return replace(_bare(trace), shared=shared)

    def _sampling_of(self, sampling: Sampling, first: int | None = None) -> Sampling:
        warmth = sampling.temperature if self._temperature is None else self._temperature
        seed = 0 if self._frozen else first if self._shared and first is not None else sampling.seed
        return replace(sampling, temperature=warmth, seed=seed)


def _bare(trace: Trace) -> Trace:
    steps = tuple(Step(context=step.context, emitted=step.emitted) for step in trace.steps)
    return replace(trace, steps=steps, accounting=None)


def facts(case: Case, subject: Subject, monkeypatch: pytest.MonkeyPatch) -> list[Fact]:
    """What the invariant says by generations; the tables are right, and asked elsewhere."""
    monkeypatch.setattr(module, "_by_rounds", lambda case, subject: iter(()))
    return list(distribution(case, ORACLE, subject))


WRONG: dict[str, tuple[Callable[[], Subject], Stage]] = {
    "arg-max in our engine": (lambda: subject_with_fault(FAULT), Stage.ACCEPTED),
    "arg-max behind the output": (lambda: subject_of(Terse(temperature=0.0)), Stage.EMITTED),
    "a neighbour's coins": (lambda: subject_of(Terse(shared=True)), Stage.EMITTED),
    "the same coins each time": (lambda: subject_of(Terse(frozen=True)), Stage.EMITTED),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_request_path_that_does_not_sample_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, stage = WRONG[name]
    evidence, compared, finding = facts(CASE, make(), monkeypatch)
    assert isinstance(evidence, Evidence)
    assert isinstance(compared, Comparisons)
    assert isinstance(finding, Finding)
    assert evidence.log_e >= log_bar(RUN_TESTS)
    assert compared.count == evidence.rounds > 0
    assert (finding.invariant, finding.stage) == ("lossless.distribution", stage)
    if "coins" in name:
        assert finding.where["side"] == "link neighbour"


@pytest.mark.parametrize("shown_stages", ["everything", "the output"])
def test_a_right_request_path_is_quiet(shown_stages: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = subject_of(open_cpu() if shown_stages == "everything" else Terse())
    monkeypatch.setattr(module, "FULL_EFFORT", replace(FULL_EFFORT, tokens=60))
    evidence, compared = facts(CASE, subject, monkeypatch)
    assert isinstance(evidence, Evidence)
    assert evidence.log_e < 3.0
    assert isinstance(compared, Comparisons)
    assert compared.count > 24


def test_tables_are_asked_beside_generations_and_alone_where_a_rule_promises_nothing() -> None:
    subject = subject_of(open_cpu())
    both = [fact for fact in distribution(CASE, ORACLE, subject) if isinstance(fact, Evidence)]
    assert [fact.smallest_tv is None for fact in both][:2] == [True, False]
    lossy = replace(CASE, sampling=replace(CASE.sampling, rule=Rule("typical"), draws="top-k"))
    alone = [fact for fact in distribution(lossy, ORACLE, subject) if isinstance(fact, Evidence)]
    assert alone
    assert all(fact.smallest_tv is not None for fact in alone)


def test_little_is_asked_unless_the_evidence_grows() -> None:
    right = generation_evidence(CASE, ORACLE, subject_of(open_cpu()), SMALL_EFFORT)
    assert SMALL_EFFORT.tokens <= right.tokens < 2 * SMALL_EFFORT.tokens + 2 * CASE.stops.max_new_tokens
    slow, short = replace(SMALL_EFFORT, tokens=4, runs=1), replace(CASE, stops=Stops(2))
    assert generation_evidence(short, ORACLE, subject_of(open_cpu()), slow).tokens == slow.tokens
    assert generation_evidence(short, ORACLE, subject_with_fault(FAULT), slow).tokens > slow.tokens


def test_the_fault_leaves_the_tables_right() -> None:
    clean, wrong = open_cpu(), open_cpu()
    assert fault_named(FAULT).plant(wrong.seams).sampling == clean.seams.sampling


def test_a_bet_on_a_neighbour_has_mean_one_at_most() -> None:
    """Exactly one where the bound is the probability, by adding up both ways each of three bets may end."""
    for bound in (0.2, 0.2 + 1e-9, 0.5):
        mean = 0.0
        for ends in np.ndindex(2, 2, 2):
            bets = Neighbours()
            for end in ends:
                bets.add(bound, bool(end))
            mean += float(np.prod([0.2 if end else 0.8 for end in ends])) * float(np.exp(bets.log_e))
        assert mean <= 1.0 + 1e-12
        assert mean == pytest.approx(1.0) or bound > 0.2


def test_bets_end_where_the_texts_part() -> None:
    bets, flat = Neighbours(), np.full(4, 0.25)
    bets.compare((1, 2, 3, 0), (1, 2, 0, 0), [flat] * 4)
    assert bets.bets == 3
    with pytest.raises(ValueError, match="no probability"):
        bets.add(1.5, True)
