"""The limit of laws on tables covers the roundings of logits, which a temperature and penalties enlarge."""

from dataclasses import replace

import numpy as np

from specverify.properties.invariants.acceptance.law import LIMIT, MOST_LIMIT, limit_on_tables
from specverify.properties.tolerance.bounds import UNIT
from specverify.reference.probability_world import World
from specverify.reference.sampling import Sampling
from specverify.reference.tree import Shape

WORLD = World(
    Shape((0, 0, 1)),
    np.log([[0.5, 0.25, 0.25]]),
    np.log([[[0.25, 0.5, 0.25]]]),
    Sampling(1.0),
    dtype="float32",
)


def beyond(world: World) -> float:
    """The limit beyond that of thresholds, in unit roundoffs of a logit's part of its probability."""
    return (limit_on_tables(world) - LIMIT[world.dtype]) / UNIT[world.dtype]


def test_each_row_of_a_block_adds_its_logits_roundings() -> None:
    # Two roundings of a logit of log(1/4), in the rows of a block of up to three tokens.
    np.testing.assert_allclose(beyond(WORLD), 2 * np.log(4) * 3, rtol=1e-6)
    np.testing.assert_allclose(beyond(replace(WORLD, shape=Shape((0,)))), 2 * np.log(4), rtol=1e-6)


def test_temperature_and_penalties_enlarge_a_logit() -> None:
    cold = replace(WORLD, sampling=replace(WORLD.sampling, temperature=0.25))
    np.testing.assert_allclose(beyond(cold), 4 * beyond(WORLD), rtol=1e-6)
    penalised = replace(WORLD, sampling=replace(WORLD.sampling, presence_penalty=-2.0, frequency_penalty=0.5))
    np.testing.assert_allclose(beyond(penalised), 2 * (np.log(4) + 2.0 + 1.5) * 3, rtol=1e-6)


def test_the_limit_stays_far_below_what_a_fault_changes() -> None:
    extreme = replace(WORLD, sampling=replace(WORLD.sampling, temperature=0.1, presence_penalty=2.0))
    assert limit_on_tables(extreme) < 1e-4
    assert limit_on_tables(replace(extreme, dtype="float64")) < 2e-10
    coldest = replace(WORLD, sampling=replace(WORLD.sampling, temperature=1e-9, presence_penalty=2.0))
    assert limit_on_tables(coldest) == MOST_LIMIT


def test_a_token_without_probability_counts_for_nothing() -> None:
    with np.errstate(divide="ignore"):
        zeros = replace(WORLD, target=np.log([[0.75, 0.25, 0.0]]))
    np.testing.assert_allclose(beyond(zeros), beyond(WORLD), rtol=1e-6)
