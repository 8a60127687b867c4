"""Bets on faults of a known draft: fair under every law in the band, and quick to see a coin used twice."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specverify.backends.base import Backend
from specverify.properties import generations
from specverify.properties.bet_group import BetGroup
from specverify.properties.laws.sampled.draft_faults import (
    BETS,
    COIN,
    DIRECTION,
    GROUPS,
    RESIDUAL,
    LawUnderFault,
    away_from_draft,
    coin_by_id,
    coin_by_rank,
    payments,
    without_residual,
)
from specverify.properties.laws.sampled.links import Links, Trial
from specverify.properties.strategies.models import GALLERY
from specverify.properties.streams import run_evidence, sights, stream_of, streams_of
from specverify.properties.tally import Tally, excess_evidence
from specverify.properties.verdict.finding import Evidence
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.trace import Array
from specverify.reference.tree import RankTree
from specverify.reports.pages.sampling import power_rows
from specverify.reports.record import sampling_tests
from specverify.setup.subjects import subject_of
from tests.corruption import ORACLE
from tests.measure.stream_calibration import calibrate_streams
from tests.strangers import black_boxes
from tests.tiers import first

EXAMPLE = np.array([0.5, 0.3, 0.2]), np.array([0.3, 0.1, 0.6])


def worlds(seed: int, count: int, width: int) -> list[tuple[Array, Array]]:
    rng = np.random.default_rng(seed)
    return [(rng.dirichlet(np.ones(width)), rng.dirichlet(np.ones(width))) for _ in range(count)]


def by_coins(p: Array, q: Array, order: Array) -> Array:
    """The law of a sampler that drafts and accepts by one coin, by running it on a fine grid of coins."""
    coins = (np.arange(200_000) + 0.5) / 200_000
    tokens = order[np.minimum(np.searchsorted(np.cumsum(q[order]), coins, side="right"), len(q) - 1)]
    accepted = coins < p[tokens] / q[tokens]
    residual = np.maximum(p - q, 0.0)
    law = np.bincount(tokens[accepted], minlength=len(p)) / len(coins)
    return np.asarray(law + (1 - accepted.mean()) * residual / residual.sum())


def test_the_laws_of_a_shared_coin_are_those_of_a_sampler_that_shares_it() -> None:
    np.testing.assert_allclose(coin_by_id(*EXAMPLE), [0.6, 0.4, 0.0], atol=1e-12)
    for p, q in worlds(0, 10, 5):
        np.testing.assert_allclose(coin_by_id(p, q), by_coins(p, q, np.arange(5)), atol=1e-4)
        np.testing.assert_allclose(coin_by_rank(p, q), by_coins(p, q, np.argsort(-q)), atol=1e-4)
        assert coin_by_rank(p, q).sum() == pytest.approx(1.0)


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_no_bet_on_the_draft_pays_more_than_one_on_average_under_any_law_of_the_band(noise: float) -> None:
    rng = np.random.default_rng(1)
    peaked = [
        (np.array([1.0, 0.0, 0.0]), np.array([0.2, 0.8, 0.0])),
        (np.array([0.5, 0.5, 0.0]), np.array([0.0, 0.0, 1.0])),
    ]
    for p, q in [*worlds(2, 4, 3), EXAMPLE, *peaked]:
        engine = p * np.exp(noise * rng.choice([-1.0, 1.0], len(p)))
        engine /= engine.sum()
        for place in (0, 3, 9):
            bets = payments(p, q, place)
            assert {name: len(pays) for name, pays in bets.items()} == GROUPS
            mean = {name: np.zeros(count) for name, count in GROUPS.items()}
            for token in np.flatnonzero(p):
                links = Links(GROUPS)
                links.add(Trial(p, replacement=int(token), noise=noise, bets=bets))
                for group in links.groups:
                    mean[group.name] += engine[token] * np.exp(group.log_es)
            assert all((pays <= 1 + 1e-9).all() for pays in mean.values())
            if not noise:
                assert all((pays >= 1 - 1e-9).all() for pays in mean.values()), "without noise no money is lost"


def test_a_bet_on_the_beginning_of_a_text_is_on_no_later_token() -> None:
    places = {bet.tokens for bet in BETS}
    assert places == {0, 1, 2, 4}
    for place in range(6):
        rows = [row for pays in payments(*EXAMPLE, place).values() for row in pays]
        assert [bool((row != 1).any()) for row in rows] == [bet.tokens == 0 or place < bet.tokens for bet in BETS]


RUNS: dict[str, Any] = {"runs": 30, "cases": 12, "texts": 6, "seed": 4}


@pytest.mark.parametrize(
    ("fault", "reach", "group"),
    [
        (coin_by_id, lambda place: 1.0, COIN),
        (coin_by_rank, lambda place: 1.0, COIN),
        (away_from_draft, lambda place: 1.0, DIRECTION),
    ],
)
def test_a_fault_of_the_draft_is_red_by_the_bets_on_it_and_not_without_them(
    fault: LawUnderFault, reach: Callable[[int], float], group: str
) -> None:
    after = calibrate_streams(**RUNS, fault=fault, reach=reach)
    before = calibrate_streams(**RUNS, fault=fault, reach=reach, groups=(RESIDUAL,))
    assert after["red"] >= 0.9
    assert before["red"] <= 0.1
    assert max(after["groups"], key=lambda name: after["groups"][name]["largest"]) == group


def warm(p: Array, q: Array) -> Array:
    """The law at one and a half times the temperature."""
    weights = p ** (1 / 1.5)
    return np.asarray(weights / weights.sum())


@pytest.mark.parametrize("fault", [without_residual, warm])
def test_what_other_bets_see_loses_at_most_the_money_of_two_streams(fault: LawUnderFault) -> None:
    """Five streams become seven: one over all settings, three settings, and one for each group of bets."""
    after = calibrate_streams(**RUNS, fault=fault)
    before = calibrate_streams(**RUNS, fault=fault, groups=(RESIDUAL,))
    assert before["median"] - after["median"] <= np.log(7 / 5) + 1e-9


def test_a_right_run_is_quiet_however_many_bets_it_makes() -> None:
    figures = calibrate_streams(runs=400, cases=10, texts=4, seed=11)
    assert figures["red"] == 0.0
    assert figures["mean_e"] <= 1.0 + 4.0 * figures["standard_error"]
    assert all(tail["share"] <= tail["markov"] for tail in figures["tails"])


# --- black boxes -----------------------------------------------------------------------------------------------------


def case_of(seed: int) -> Case:
    """A small sampled case whose draft is a model of its own."""
    draft = LanguageModel(Seeded(GALLERY[1], seed + 5), RankTree((0, 0, 1), (0, 0, 0)))
    return Case(Seeded(GALLERY[1], seed), (3, 1, 4), draft, sampling=Sampling(2.5), stops=Stops(4))


def evidence_of(open_box: Callable[[], Backend], cases: int, monkeypatch: pytest.MonkeyPatch) -> list[Evidence]:
    """The tests of whole generations of short texts on several cases."""
    monkeypatch.setattr(generations, "MIN_ROOM", 4)
    tests = []
    for seed in range(cases):
        case = case_of(seed)
        heard = generations.generation_evidence(case, ORACLE, subject_of(open_box()), generations.FULL_EFFORT)
        name, parts, resolution = "lossless.distribution", heard.parts, heard.links.resolution
        stream = stream_of(name, case)
        tests.append(
            Evidence(name, heard.log_e, heard.draws, None, None, stream, parts, resolution, heard.links.groups)
        )
    return tests


@pytest.mark.parametrize(("box", "cases"), first([("shared_reseeded", 2), ("shared_generators", 4)], 1))
def test_a_black_box_whose_draft_and_verifier_share_a_coin_is_condemned(
    box: str, cases: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = evidence_of(getattr(black_boxes, box), cases, monkeypatch)
    reason = excess_evidence(Tally(box, evidence=tests))
    assert reason is not None
    assert f"lossless.distribution {COIN}" in reason
    without = [replace(test, groups=tuple(group for group in test.groups if group.name == RESIDUAL)) for test in tests]
    assert excess_evidence(Tally(box, evidence=without)) is None, "the bets on a coin are what shows it"


def test_the_same_black_box_on_coins_of_their_own_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    tests = evidence_of(black_boxes.unshared, 3, monkeypatch)
    assert run_evidence(tests) < np.log(100)


# --- what a page says of it ------------------------------------------------------------------------------------------


def test_a_page_names_the_faults_that_would_have_shown_and_those_that_would_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (test,) = evidence_of(black_boxes.unshared, 1, monkeypatch)
    few, many = Tally("x", evidence=[test]), Tally("x", evidence=[test] * 12)
    power_text = {
        name: " / ".join(text for _, text in power_rows(tally)) for name, tally in (("few", few), ("many", many))
    }
    assert "of the draws to or from the likeliest token would have shown" in power_text["few"]
    coin = "a coin that drafts and accepts, by order of ids"
    assert f"would not have shown: {coin}" in power_text["few"]
    shown_part = power_text["many"].split(
        f"for lossless.distribution {COIN}, which would have shown with probability .99: "
    )[1]
    assert shown_part.startswith(coin)
    assert "whole generations do not cover shifts among other tokens" in power_text["many"]
    assert "nor faults of a draft" not in power_text["many"]
    alone = Tally("x", evidence=[replace(test, groups=())])
    assert "nor faults of a draft whose law is not known" in power_rows(alone)[-1][1]


def test_json_names_the_events_and_the_faults_of_each_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    (test,) = evidence_of(black_boxes.unshared, 1, monkeypatch)
    streams = {stream["name"]: stream for stream in sampling_tests(Tally("x", evidence=[test]))["streams"]}
    setting = streams[stream_of("lossless.distribution", case_of(0))]
    assert setting["about"] == ("the likeliest token",)
    assert setting["faults"] == ()
    coins = streams[f"lossless.distribution {COIN}"]["faults"]
    assert {(sight.fault, sight.tokens) for sight in coins} == {
        (bet.fault, bet.tokens) for bet in BETS if bet.group == COIN
    }


def test_a_fault_that_moves_more_or_reaches_more_draws_is_seen_sooner() -> None:
    bets = [bet for bet in BETS if bet.group == COIN]
    growth = tuple(20.0 * bet.share if bet.tokens == 0 else 1.0 for bet in bets)
    unit_weights = (1.0,) * len(bets)
    group = BetGroup(
        COIN, 10, unit_weights, growth, unit_weights, unit_weights, tuple(float(bet.tokens or 10) for bet in bets)
    )
    group_sights = sights(group, 10.0)
    assert {sight.tokens for sight in group_sights if sight.shown} == {0}
    assert [sight.share for sight in group_sights if sight.shown] == [0.1, 0.1]
    assert not any(sight.shown for sight in sights(group, 30.0))
    twice = streams_of([Evidence("x", 0.0, 10, groups=(group,))] * 2).over_settings[0]
    assert (twice.tests, twice.draws, twice.group) == (2, 20, group + group)
