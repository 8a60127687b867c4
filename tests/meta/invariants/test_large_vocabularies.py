"""Log-probabilities over a large vocabulary may be off by the roundings of a sum of so many terms, and by no more."""

import pytest

from specverify.properties.invariants.lossless.processing import rounding_error


@pytest.mark.parametrize(("vocabulary", "least", "most"), [(31, 5e-7, 1e-6), (151_936, 1e-4, 2e-3)])
def test_the_sum_is_rounded_once_for_each_token_of_a_lane(vocabulary: int, least: float, most: float) -> None:
    assert least < rounding_error(-0.18, "float32", vocabulary) < most
    assert rounding_error(-0.18, "bfloat16", vocabulary) == rounding_error(-0.18, "float32", vocabulary)
    assert rounding_error(-0.18, "float64", vocabulary) < 1e-11
