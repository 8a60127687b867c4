"""The law of accepted counts, against an enumeration of everything that an engine of chains may do."""

from collections import defaultdict
from itertools import product

import numpy as np
import pytest

from specverify.properties.laws.accepted_counts import (
    TILTS,
    Rates,
    expected_lengths,
    log_evidence_of,
    log_moments,
    possible_counts,
)
from specverify.reference.trace import Array

VOCABULARY, LENGTH, CHAIN = 3, 4, 2


def accepted(length: int, _: int) -> float:
    """The part of a chain in the number of all accepted tokens."""
    return length


Laws = dict[tuple[int, ...], Array]


def laws(seed: int) -> Laws:
    """A law after each text of fewer than LENGTH + CHAIN tokens."""
    rng = np.random.default_rng(seed)
    texts = [text for length in range(LENGTH + CHAIN) for text in product(range(VOCABULARY), repeat=length)]
    return {text: rng.dirichlet(np.ones(VOCABULARY)) for text in texts}


Outcomes = dict[tuple[tuple[int, ...], int], float]


def chain_outcomes(target: Laws, draft: Laws, text: tuple[int, ...], rule: str) -> Outcomes:
    """The probability of each block behind `text` with its number of accepted tokens, by rejection or by matching."""
    outcomes: Outcomes = defaultdict(float)

    def go_on(block: tuple[int, ...], mass: float) -> None:
        p, q = target[text + block], draft[text + block]
        if len(block) == CHAIN:
            for token in range(VOCABULARY):
                outcomes[(*block, token), CHAIN] += mass * p[token]
            return
        accepted = np.minimum(p, q) if rule == "rejection" else p * q
        rejected = p - accepted  # of a law's tokens, those that were not accepted come by its replacement
        for token in range(VOCABULARY):
            outcomes[(*block, token), len(block)] += mass * rejected[token]
            go_on((*block, token), mass * accepted[token])

    go_on((), 1.0)
    return outcomes


def counts_by_text(target: Laws, draft: Laws, rule: str) -> dict[tuple[int, ...], dict[int, float]]:
    """The joint law of the first LENGTH tokens and of the accepted tokens of all chains, those beyond them included."""
    joint: dict[tuple[int, ...], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    open_texts: Outcomes = {((), 0): 1.0}
    while open_texts:
        longer: Outcomes = defaultdict(float)
        for (text, count), mass in open_texts.items():
            for (block, accepted), share in chain_outcomes(target, draft, text, rule).items():
                longer[text + block, count + accepted] += mass * share
        open_texts = {}
        for (text, count), mass in longer.items():
            if len(text) >= LENGTH:
                joint[text[:LENGTH]][count] += mass
            else:
                open_texts[text, count] = mass
    return joint


@pytest.mark.parametrize("rule", ["rejection", "match"])
def test_the_moments_bound_those_of_an_engine_on_every_text(rule: str) -> None:
    target, draft = laws(0), laws(1)
    joint = counts_by_text(target, draft, rule)
    assert len(joint) == VOCABULARY**LENGTH
    widest = 0.0
    for text, counts in joint.items():
        places = [(text[:place], text[place]) for place in range(LENGTH)]
        p, q = (np.array([law[before][token] for before, token in places]) for law in (target, draft))
        rates = np.minimum(1.0, q / p) if rule == "rejection" else q
        mass = sum(counts.values())
        np.testing.assert_allclose(mass, p.prod(), rtol=1e-12)
        true = [np.log(sum(share * np.exp(tilt * count) for count, share in counts.items()) / mass) for tilt in TILTS]
        bound = log_moments(Rates(rates, rates), CHAIN, accepted)
        assert np.all(bound >= np.array(true) - 1e-9)
        # The bound's slack is what a last chain may do beyond the text: a few tokens.
        widest = max(widest, float((bound - np.array(true))[10]))
    assert widest < 0.1 * CHAIN


def test_a_certain_count_admits_what_the_last_chain_may_do_and_no_more() -> None:
    hits = np.array([1, 1, 1, 0, 1, 0, 0, 1, 1, 1, 0, 1.0])
    moments = log_moments(Rates(hits, hits), 3, accepted)
    # Chains begin at 0, 4, 6, 7 and 11 (3 + 1 + 0 + 3 tokens), or at 1, 4, ... where the prompt's forward gave the
    # first token (2 + 1 + 0 + 3); the last one has room for one token and may accept 0 to 3.
    assert possible_counts(moments, 0, 20, 30.0) == (6, 10)
    first = log_moments(Rates(hits, hits), 3, lambda length, _: length > 0)
    assert possible_counts(first, 0, 20, 30.0) == (3, 4)
    third = log_moments(Rates(hits, hits), 3, lambda length, _: length > 2)
    assert possible_counts(third, 0, 20, 30.0) == (1, 3)
    assert log_evidence_of(5, moments) > 30.0


def test_an_open_place_widens_the_counts_and_a_sum_of_texts_narrows_their_mean() -> None:
    low, high = np.array([0.0, 0.0, 1.0, 0.0]), np.array([1.0, 1.0, 1.0, 0.0])
    assert possible_counts(log_moments(Rates(low, high), 2, accepted), 0, 9, 30.0) == (1, 2)
    half = np.full(8, 0.5)
    moments = log_moments(Rates(half, half), 2, accepted)
    alone, many = possible_counts(moments, 0, 20, 23.0), possible_counts(100 * moments, 0, 2000, 23.0)
    assert (many[1] - many[0]) / 100 < 0.5 * (alone[1] - alone[0])


def test_where_no_count_is_possible_the_likeliest_is_given() -> None:
    assert possible_counts(4.0 * TILTS, 0, 9, -100.0) == (4, 4)


def test_expected_lengths_are_those_of_certain_and_of_uncertain_rates() -> None:
    hits = np.array([1, 1, 1, 0, 1, 0, 0, 1, 1, 1, 0, 1.0])
    # Chains begin at 0, 4, 6, 7 and 11; the last one has no room for more than its token.
    np.testing.assert_allclose(expected_lengths(Rates(hits, hits), 3), [5, 3, 2, 2])
    half = np.full(2, 0.5)
    np.testing.assert_allclose(expected_lengths(Rates(half, half), 1), [1.5, 0.5])
