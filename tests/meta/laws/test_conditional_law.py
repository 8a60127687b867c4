"""Sampling without tables: a generation's own draws are tested one after the other, and wrong laws are seen in them."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "strangers"))

from specverify.properties.generations import RUN_TESTS, Effort
from specverify.properties.invariants.lossless import distribution as invariant
from specverify.properties.invariants.lossless.distribution import distribution
from specverify.properties.laws.draw_by_draw import logit_bound, points, trials, tried_siblings
from specverify.properties.laws.sampled.gate import log_bar
from specverify.properties.laws.sampled.links import Links, Trial
from specverify.properties.laws.sampled.truncated import band
from specverify.properties.strategies.models import GALLERY
from specverify.properties.tolerance.closeness import noise
from specverify.properties.verdict.finding import Comparisons, Evidence, Finding
from specverify.properties.verdict.invariant import NotApplicable
from specverify.properties.verdict.subject import Subject
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel, Scripted
from specverify.reference.oracle import processing
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.rules import RULES, Rule
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.trace import Array
from specverify.reference.tree import RankTree, Tree
from specverify.setup.subjects import open_planted, subject_of
from tests.tiers import each, first

torch.set_num_threads(1)
ORACLE = Oracle()
WIDE = GALLERY[7]
"""A vocabulary of 101."""

FORK, LINE = RankTree((0, 0, 0, 1), (0, 0, 1, 0)), RankTree((0, 0, 1), (0, 0, 0))


def hidden(fault: str | None = None) -> Subject:
    """The engine, its tables out of sight."""
    subject = subject_of(open_planted("cpu-eager", fault))
    subject.tables = None
    return subject


def case(draws: str = "without-replacement", rule: str = "multi-round", **settings: object) -> Case:
    """24 tokens of a model with 101 tokens, drafted by another of its kind."""
    shape = LINE if RULES[rule].chains_only else FORK
    sampling = Sampling(**{"temperature": 2.5, **settings}, rule=Rule(rule), draws=draws)  # type: ignore[arg-type]
    return Case(Seeded(WIDE, 0), (3, 1, 4), LanguageModel(Seeded(WIDE, 1), shape), sampling=sampling, stops=Stops(24))


def evidence_of(drawn_case: Case, subject: Subject) -> tuple[Evidence, Finding | None]:
    facts = [fact for fact in distribution(drawn_case, ORACLE, subject) if not isinstance(fact, Comparisons)]
    assert isinstance(facts[0], Evidence)
    assert facts[0].smallest_tv is None
    finding = facts[1] if len(facts) > 1 else None
    assert finding is None or isinstance(finding, Finding)
    return facts[0], finding


CLEAN = {
    "drawn": case(),
    "drawn with processing": case(temperature=0.9, top_k=6, top_p=0.9, min_p=0.05, repetition_penalty=1.3),
    "ranked, eagle": case("top-k", "eagle"),
    "chain in 16 bits": replace(case(rule="chain"), dtype="bfloat16"),
    "output alone": case("with-replacement", "specinfer"),
}


@pytest.mark.parametrize("name", first(CLEAN, 2))
def test_a_correct_engine_without_tables_is_quiet(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariant, "FULL_EFFORT", Effort(72, 24))
    evidence, finding = evidence_of(CLEAN[name], hidden())
    assert finding is None
    assert evidence.log_e < np.log(1e3)
    assert evidence.rounds >= 72


FAULTS = {
    "residual-zeroes-token-only": (case(), 100, "token"),
    "residual-from-row-zero": (case(), 400, "token"),
    "resampled-from-row-after": (case(), 100, "token"),
    "bonus-from-whole-law": (case(), 100, "token"),
    "residual-through-softmax": (case(), 100, "token"),
    "acceptance-ignores-coin": (case(), 100, "accept"),
    "accepted-only-if-likelier": (case(), 400, "accept"),
    "acceptance-ratio-reversed": (case(), 100, "accept"),
    "residual-by-arg-max": (case("top-k"), 100, "token"),
    "soft-law-for-ranked-tokens": (case("top-k"), 100, "draft"),
    "proposal-without-temperature": (case(), 100, "draft"),
    "target-law-under-default-settings": (case(), 100, "accept"),
}
"""Where each shows: the case, tokens that are enough, and the link that sees it."""


@pytest.mark.parametrize("name", each(FAULTS, 2))
def test_a_fault_is_seen_without_tables(name: str) -> None:
    drawn_case, most, link = FAULTS[name]
    evidence, finding = evidence_of(drawn_case, hidden(name))
    assert finding is not None
    assert evidence.log_e >= log_bar(RUN_TESTS)
    assert int(finding.where["tokens"]) <= most
    assert finding.where["side"] == f"link {link}"


@pytest.mark.parametrize(("factory", "wrong"), [("sampler", False), ("hot", True)])
def test_a_stranger_that_shows_its_output_alone_is_judged(
    factory: str, wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(invariant, "FULL_EFFORT", Effort(300 if wrong else 72, 24))
    from specverify.properties.verdict.judge import judge
    from specverify.setup.selection import invariants_matching

    subject = subject_of(open_planted(f"terse_sampler:{factory}", None))
    drawn_case = case(temperature=1.5)
    verdict = judge(drawn_case, invariants_matching(("lossless.distribution",)), ORACLE, subject)
    assert verdict.outcomes["lossless.distribution"] == ("failed" if wrong else "checked")
    assert tried_siblings(drawn_case, subject(drawn_case)) is None
    if wrong:
        assert verdict.first is not None
        assert verdict.first.where["side"] == "link token"
        assert int(verdict.first.where["tokens"]) <= 300


def test_a_rule_that_promises_nothing_is_not_judged() -> None:
    for drawn_case in (case("top-k", "typical"), case("with-replacement", "target-only")):
        with pytest.raises(NotApplicable, match="does not promise"):
            list(distribution(drawn_case, ORACLE, hidden()))
    twins = Scripted((Tree((0, 0, 0), (4, 2, 2)),))
    with pytest.raises(NotApplicable, match="does not promise"):
        list(distribution(replace(case("top-k", "target-only"), draft=twins), ORACLE, hidden()))


# --- trials ----------------------------------------------------------------------------------------------------------


def test_each_rejected_sibling_is_a_trial_and_a_stop_ends_them() -> None:
    drawn_case, subject = case(), hidden()
    trace = subject(drawn_case)
    all_trials = list(trials(drawn_case, trace, points(drawn_case, ORACLE, trace, 1e-3)))
    walks = tried_siblings(drawn_case, trace)
    assert walks is not None
    assert len(walks) == len(trace.output)
    assert len(all_trials) == sum(max(1, len(tried)) for tried, _ in walks)
    # Every token of the output is the end of exactly one level: accepted, or in the place of what was rejected.
    ends = [trial.drafted if trial.accepted else trial.replacement for trial in all_trials]
    assert tuple(token for token in ends if token is not None) == trace.output
    assert any(len(tried) == 2 and not accepted for tried, accepted in walks), "siblings were rejected, one and two"
    cut = next(index for index, token in enumerate(trace.output) if index > 3)
    stopped = replace(drawn_case, stops=Stops(cut + 1))
    shorter = subject(stopped)
    again = list(trials(stopped, shorter, points(stopped, ORACLE, shorter, 1e-3)))
    assert len(shorter.output) == cut + 1
    assert [trial.drafted for trial in again] == [trial.drafted for trial in all_trials][: len(again)]


def test_a_walk_that_is_not_the_outputs_own_is_not_believed() -> None:
    drawn_case, subject = case(), hidden()
    trace = subject(drawn_case)
    step = trace.steps[0]
    assert step.emitted is not None
    other_tokens = (*step.emitted.tokens[:-1], (step.emitted.tokens[-1] + 1) % 101)
    lied = replace(trace, steps=(replace(step, emitted=replace(step.emitted, tokens=other_tokens)), *trace.steps[1:]))
    assert tried_siblings(drawn_case, trace) is not None
    assert tried_siblings(drawn_case, lied) is None
    assert all(trial.drafted is None for trial in trials(drawn_case, lied, points(drawn_case, ORACLE, lied, 1e-3)))


def test_custom_processors_need_the_engines_own_logits() -> None:
    drawn_case = case(processors=("tests.none:such",))
    trace = hidden()(case())
    bare = replace(trace, steps=tuple(replace(step, scored=None) for step in trace.steps))
    with pytest.raises(NotApplicable, match="no bound"):
        points(drawn_case, ORACLE, bare, 1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_the_bound_holds_every_logit_of_the_engine(dtype: str) -> None:
    drawn_case, subject = replace(case(), dtype=dtype), hidden()
    bound = logit_bound(drawn_case, noise(drawn_case, ORACLE, subject))
    trace = subject(drawn_case)
    furthest = 0.0
    for number, step in enumerate(trace.steps[:4]):
        assert step.drafted is not None
        assert step.scored is not None
        true = ORACLE(drawn_case.rebased(step.context, step.drafted.tree)).steps[0].scored
        assert true is not None, number
        furthest = max(furthest, float(np.abs(step.scored.logits - true.logits).max()))
    assert 0.0 < furthest <= bound


# --- truncation under noise ------------------------------------------------------------------------------------------


def draw_scores(rng: np.random.Generator, vocab: int, kind: str) -> Array:
    """Scores with gaps, with ties, or with banned tokens."""
    row = rng.normal(0, 2, vocab)
    if kind == "ties":
        row = np.round(row)
    if kind == "banned":
        row[rng.permutation(vocab)[: vocab // 3]] = -np.inf
    return row


SETTINGS: tuple[dict[str, Any], ...] = (
    {"top_k": 3},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"top_k": 4, "top_p": 0.8},
    {"top_k": 5, "top_p": 0.9, "min_p": 0.1},
    {},
)


@pytest.mark.parametrize("kind", ["gaps", "ties", "banned"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_no_row_within_the_noise_leaves_the_band(settings: dict[str, Any], kind: str) -> None:
    rng = np.random.default_rng([len(kind), len(settings)])
    sampling = Sampling(1.0, **settings)
    doubted = settled = 0
    for _ in range(20):
        row = draw_scores(rng, 9, kind)
        for noise_of in (0.0, 1e-9, 0.01, 0.3):
            low, high = band(row, noise_of, sampling)
            doubted += int(((low == 0) & (high > 0)).any())
            settled += int((low > 0).any())
            assert (low <= high + 1e-15).all()
            for shift in shifts(rng, row, noise_of):
                p = processing.law(row + shift, sampling, Stops(), (0,), ())
                assert (low <= p * (1 + 1e-9)).all()
                assert (p <= high * (1 + 1e-9)).all()
    assert settled > 40
    assert doubted > 3 or not settings


def shifts(rng: np.random.Generator, row: Array, most: float) -> list[Array]:
    """Perturbations of at most `most`: inside, at corners, and those that push two neighbours in rank together."""
    moves = [rng.uniform(-most, most, len(row)) for _ in range(4)]
    moves += [most * rng.choice([-1.0, 1.0], len(row)) for _ in range(4)]
    order = np.argsort(-row)
    for rank in range(len(row) - 1):
        upper, lower = order[rank], order[rank + 1]
        if not np.isfinite(row[lower]):
            break
        together = np.zeros(len(row))
        gap = min(most, (row[upper] - row[lower]) / 2)
        together[upper], together[lower] = -gap, gap
        moves.append(together)
    return [shift if most else np.zeros(len(row)) for shift in moves]


def test_without_noise_and_ties_the_band_is_the_law() -> None:
    rng = np.random.default_rng(3)
    for settings in SETTINGS:
        sampling = Sampling(1.0, **settings)
        row = draw_scores(rng, 12, "gaps")
        low, high = band(row, 0.0, sampling)
        p = processing.law(row, sampling, Stops(), (0,), ())
        assert low == pytest.approx(p, abs=1e-9)
        assert high == pytest.approx(p, abs=1e-9)


def test_a_band_too_narrow_would_be_seen() -> None:
    rng, row = np.random.default_rng(4), np.array([2.0, 1.0, 1.0, 0.5, -1.0])
    sampling = Sampling(1.0, top_k=2, top_p=0.9)
    low, high = band(row, 0.001, sampling)
    num_outside = 0
    for _ in range(200):
        p = processing.law(row + rng.uniform(-0.1, 0.1, 5), sampling, Stops(), (0,), ())
        num_outside += bool((p < low * (1 - 1e-9)).any() or (p > high * (1 + 1e-9)).any())
    assert num_outside > 50


def test_a_truncated_stream_is_quiet_though_its_edges_are_in_doubt() -> None:
    """An engine whose logits are noisy keeps another token now and then; taken for exact, that is a violation."""
    rng, honest, naive = np.random.default_rng(5), Links(), Links()
    sampling = Sampling(1.0, top_k=8, top_p=0.8)
    for _ in range(400):
        row = rng.normal(0, 2, 64)
        p = processing.law(row, sampling, Stops(), (0,), ())
        engine = processing.law(row + rng.uniform(-0.3, 0.3, 64), sampling, Stops(), (0,), ())
        token = int(rng.choice(64, p=engine))
        for links, noise_of in ((honest, 0.3), (naive, 0.0)):
            low, high = band(row, noise_of, sampling)
            links.add(Trial(p, replacement=token, low=low, high=high))
    assert honest.log_e < np.log(100)
    assert naive.log_e == np.inf
