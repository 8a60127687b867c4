"""The test of accepted tokens by position: its error rate, its power, and what it must not tell apart."""

import numpy as np
import pytest

from specverify.properties.paired_acceptance import (
    AcceptCounts,
    compare_acceptance,
    counts_of_lengths,
)


def drawn_run(rng: np.random.Generator, rates: np.ndarray, steps: int, levels: int = 4) -> dict[object, AcceptCounts]:
    """A run of chains: on prompt i every drafted token is accepted with probability `rates[i]`, up to a rejection."""
    run: dict[object, AcceptCounts] = {}
    for prompt, rate in enumerate(rates):
        lengths = np.cumprod(rng.random((steps, levels)) < rate, 1).sum(1)
        run[prompt] = counts_of_lengths(lengths.tolist())
    return run


def test_counts_are_steps_that_accept_so_many() -> None:
    assert counts_of_lengths([0, 2, 1, 2]) == AcceptCounts((3, 2), 4)
    assert counts_of_lengths([0, 0]) == AcceptCounts((), 2)


def test_equal_laws_are_told_to_differ_no_more_often_than_stated() -> None:
    rng, alarms, alpha, runs = np.random.default_rng(1), 0, 0.1, 300
    for _ in range(runs):
        rates = rng.uniform(0.3, 0.95, 15)  # prompts differ a lot, engines do not
        first, second = drawn_run(rng, rates, 20), drawn_run(rng, rates, 20)
        alarms += compare_acceptance(first, second, alpha).verdict == "differs"
    # Binomial: 30 are expected, and more than 48 come once in 1000 such tests.
    assert alarms <= 48
    assert alarms >= 10  # a test that never speaks would pass the line above


def test_the_rise_of_sglang_is_seen_and_told_by_position() -> None:
    # From 2.59 to 2.9 accepted tokens (with the target's own) of at most 5, on 80 prompts of 64 tokens.
    rng = np.random.default_rng(2)
    rates = rng.uniform(0.5, 0.8, 80)
    first, second = drawn_run(rng, rates, 25), drawn_run(rng, np.minimum(rates + 0.06, 1.0), 25)
    test = compare_acceptance(first, second, 0.001)
    assert (test.verdict, test.prompts) == ("differs", 80)
    every = test.positions[0]
    assert every.second - every.first == pytest.approx(0.3, abs=0.12)
    assert [position.number for position in test.positions] == [0, 1, 2, 3, 4]
    assert all(position.second > position.first for position in test.positions)


def test_a_difference_at_one_position_is_told_there() -> None:
    rng = np.random.default_rng(3)
    first = drawn_run(rng, np.full(60, 0.7), 25)
    second = {prompt: AcceptCounts((*counts.accepted[:2], 0, 0), counts.offered) for prompt, counts in first.items()}
    test = compare_acceptance(first, second, 0.001)
    assert test.verdict == "differs"
    assert [position.p_value <= 0.001 for position in test.positions[1:]] == [False, False, True, True]


def test_equal_counts_few_prompts_and_no_prompt_have_words_of_their_own() -> None:
    rng = np.random.default_rng(4)
    run, other_run = drawn_run(rng, np.full(6, 0.5), 30), drawn_run(rng, np.full(6, 0.95), 30)
    assert compare_acceptance(run, run).verdict == "equal"
    few = compare_acceptance(run, other_run, 0.001)
    assert (few.verdict, few.least_p) == ("too few", 2.0**-5)
    assert few.p_value >= 0.02  # two of 64 trades are as far out
    assert compare_acceptance({}, other_run).verdict == "too few"
    assert compare_acceptance(run, other_run, 0.05).verdict == "differs"


def test_counts_without_positions_are_compared_too() -> None:
    rng = np.random.default_rng(5)
    first = {prompt: AcceptCounts((int(rng.binomial(100, 0.6)),), 100) for prompt in range(40)}
    second = {prompt: AcceptCounts((int(rng.binomial(120, 0.72)),), 120) for prompt in range(40)}
    test = compare_acceptance(first, second)
    assert test.verdict == "differs"
    assert test.positions[1].first == pytest.approx(0.6, abs=0.03)
    assert test.positions[1].second == pytest.approx(0.72, abs=0.03)
