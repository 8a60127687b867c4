"""The two-sample e-process over tokens and the streams of a run: their error rates, their power, what they state."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from specverify.properties.bet_group import BetGroup
from specverify.properties.laws.sampled.gate import ALPHA_RUN, log_evidence, stream_bar
from specverify.properties.laws.sampled.partners import PARTNERS, PARTS, Partners
from specverify.properties.resolution import GRID, Resolution, ResolutionSums
from specverify.properties.streams import Stream, Streams, run_evidence, streams_of
from specverify.properties.tally import Tally, excess_evidence
from specverify.properties.verdict.finding import Evidence
from specverify.reference.trace import Array

WIDE = 24


def law(rng: np.random.Generator, temperature: float, row: Array) -> Array:
    weights = np.exp((row - row.max()) / temperature)
    return np.asarray(weights / weights.sum())


def compare_engine(seed: int, tokens: int, ratio: float = 1.0) -> Partners:
    """An engine at `ratio` times the reference's temperature, after a new text each time."""
    rng, pair = np.random.default_rng(seed), Partners()
    for text in range(tokens):
        row = 2.5 * rng.normal(size=WIDE)
        token = int(rng.choice(WIDE, p=law(rng, ratio, row)))
        drawn = rng.choice(WIDE, p=law(rng, 1.0, row), size=PARTNERS)
        pair.add(text, token, tuple(drawn.tolist()), int(row.argmax()))
    return pair


def evidence(pair: Partners, warmth: float = 1.0, log_e: float | None = None) -> Evidence:
    pair_log_e = pair.log_e if log_e is None else log_e
    stream, resolution = f"pair.same-law at temperature {warmth:g}", pair.resolution
    return Evidence("pair.same-law", pair_log_e, pair.rounds, stream=stream, parts=pair.parts, resolution=resolution)


@pytest.mark.parametrize("before", [(), (0, 0, 1, 1, 2)])
def test_every_bet_has_mean_one_whatever_the_law(before: tuple[int, ...]) -> None:
    """By adding up all ways in which a round may end, after no round and after one at the same text."""
    p = np.array([0.6, 0.3, 0.1])
    mean = np.zeros(PARTS)
    for token, *drawn in product(range(3), repeat=1 + PARTNERS):
        pair = Partners()
        if before:
            pair.add("text", before[0], before[1:], 0)
        parts = np.array(pair.parts)
        pair.add("text", token, tuple(drawn), 0)
        mean += p[[token, *drawn]].prod() * np.exp(np.array(pair.parts) - parts)
    np.testing.assert_allclose(mean, 1.0, rtol=1e-9)


def test_equal_laws_are_left_alone_and_a_wrong_temperature_is_seen() -> None:
    assert max(compare_engine(seed, 300).log_e for seed in range(20)) < np.log(20 / 0.01)
    for ratio in (1.5, 1 / 1.5):
        assert compare_engine(1, 1200, ratio).log_e > -np.log(ALPHA_RUN)


def test_one_text_that_comes_often_shows_a_deviation_of_any_shape() -> None:
    """Two tokens of equal mass change places: neither commoner nor rarer tokens are preferred."""
    rng, pair = np.random.default_rng(0), Partners()
    tested_law, partner_law = np.array([0.35, 0.15, 0.35, 0.15]), np.array([0.15, 0.35, 0.15, 0.35])
    for _ in range(400):
        pair.add(
            "text", int(rng.choice(4, p=tested_law)), tuple(rng.choice(4, p=partner_law, size=PARTNERS).tolist()), 3
        )
    assert pair.log_e > -np.log(ALPHA_RUN)


@pytest.mark.parametrize("upwards", [True, False])
def test_a_shift_of_the_stated_size_reaches_the_bar(upwards: bool) -> None:
    rng, bar, rounds = np.random.default_rng(5), stream_bar(PARTS, 1), 400
    texts = [rng.choice(6, p=[0.5, 0.2, 0.12, 0.1, 0.05, 0.03], size=1 + PARTNERS).tolist() for _ in range(rounds)]
    sums = ResolutionSums()
    scores = [np.array([float(label == 0) for label in many]) for many in texts]
    for row_scores in scores:
        sums.add_labels(int(row_scores.sum()), len(row_scores))
    stated = sums.resolution.smallest(bar)
    tilts = [theta for theta in GRID if (theta > 0) == upwards]
    shift = {theta: sums.resolution.shift[int(np.argmax(theta == GRID))] / rounds for theta in tilts}
    theta = next(theta for theta in tilts if shift[theta] >= stated or theta == tilts[-1])
    reached = 0
    for _ in range(25):
        pair = Partners()
        for text, (many, score) in enumerate(zip(texts, scores, strict=True)):
            odds = np.exp(theta * score)
            first = int(rng.choice(len(many), p=odds / odds.sum()))
            pair.add(text, many[first], tuple(many[:first] + many[first + 1 :]), 0)
        reached += max(pair.parts) >= bar - np.log(PARTS)
    assert stated < 0.5
    assert reached >= 23


def test_more_draws_see_smaller_shifts_and_none_sees_nothing() -> None:
    resolution = compare_engine(0, 200).resolution
    bar = stream_bar(PARTS, 1)
    sizes = [
        Resolution().smallest(bar),
        resolution.smallest(bar),
        resolution.times(4).smallest(bar),
        resolution.times(100).smallest(bar),
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 1.0
    assert sizes[2] == pytest.approx(sizes[1] / 2, rel=0.35)
    assert (resolution + resolution).draws == resolution.times(2).draws == 400
    np.testing.assert_allclose((resolution + resolution).growth, resolution.times(2).growth)


def test_an_event_is_known_within_its_bounds() -> None:
    exact, wide = ResolutionSums(), ResolutionSums()
    for _ in range(300):
        exact.add_event(0.6, 0.6, 0.6)
        wide.add_event(0.6, 0.5, 0.7)
    assert exact.resolution.smallest(14.0) < 0.25 < wide.resolution.smallest(14.0)


def test_what_each_case_shows_a_little_adds_up_over_the_stream() -> None:
    cases = [evidence(compare_engine(seed, 24, 1.5)) for seed in range(60)]
    assert max(case.log_e for case in cases) < -np.log(ALPHA_RUN)
    (stream,) = streams_of(cases).all
    assert (stream.tests, stream.draws) == (60, 60 * 24)
    assert stream.log_e > 3 + max(case.log_e for case in cases)
    np.testing.assert_allclose(stream.parts, np.sum([case.parts for case in cases], axis=0))
    bare = [replace(case, stream="") for case in cases]
    assert run_evidence(cases) > log_evidence(np.array([case.log_e for case in bare]))
    tally = Tally("x", evidence=list(cases))
    reason = excess_evidence(tally)
    assert reason is not None
    assert "most in pair.same-law" in reason


def test_settings_are_streams_of_their_own_beside_the_one_over_all() -> None:
    evidences = [evidence(compare_engine(seed, 30), warmth) for seed, warmth in enumerate((0.4, 1.0, 0.4))]
    streams = streams_of([*evidences, Evidence("lossless.distribution", 0.0, 9, 0.1)])
    assert [(stream.name, stream.draws) for stream in streams.all] == [
        ("pair.same-law", 90),
        ("pair.same-law at temperature 0.4", 60),
        ("pair.same-law at temperature 1", 30),
    ]
    assert streams.smallest(streams.all[0]) < streams.smallest(streams.all[2])
    assert streams_of([]).strongest is None
    assert Streams().log_es == []
    assert Stream("x").log_e == 0.0


def test_bets_on_the_draft_are_one_stream_over_every_setting() -> None:
    bets = BetGroup("on the draft", 9, (0.6, -0.6), *((0.0, 0.0),) * 4)
    weak = [Evidence("lossless.distribution", 0.0, 9, groups=(bets,))] * 40
    streams = streams_of(weak)
    assert [stream.name for stream in streams.all] == ["lossless.distribution on the draft"]
    assert streams.log_es == [pytest.approx(24.0 - np.log(2))]
    assert excess_evidence(Tally("x", evidence=weak)) is not None, "no test alone shows it"
    assert excess_evidence(Tally("x", evidence=weak[:20])) is None


def test_the_money_on_streams_is_a_part_of_the_whole() -> None:
    """A run without streams keeps that money; one strong stream is enough, and the whole is no more than its parts."""
    assert log_evidence(np.zeros(5)) == pytest.approx(0.0)
    assert log_evidence(np.zeros(5), streams=[0.0, 0.0]) == pytest.approx(0.0)
    bar = stream_bar(1, 2)
    assert log_evidence(np.full(5, -np.inf), streams=[bar, -np.inf]) == pytest.approx(-np.log(ALPHA_RUN))
    values: Any = np.array([3.0, -1.0])
    assert log_evidence(values, streams=[9.0]) < max(9.0, float(values.sum()))


def test_events_that_are_certain_show_no_shift() -> None:
    certain = ResolutionSums()
    for _ in range(300):
        certain.add_event(1.0, 1.0, 1.0)
    assert certain.resolution.smallest(13.8) == 1.0
    assert certain.resolution.times(5).smallest(13.8) == 1.0
    assert Resolution().smallest(13.8) == 1.0
