"""Greedy continuations that steer drawn trees are those of the oracle's plain decode."""

import numpy as np
import pytest

from specverify.properties.strategies.acceptance import LOOKAHEAD, continuation, first_law
from specverify.properties.strategies.models import GALLERY
from specverify.reference.architecture import Architecture, Seeded
from specverify.reference.case import Case
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Stops
from tests.models import FOUR_TOKENS


@pytest.mark.parametrize("arch", GALLERY[:40:3], ids=lambda arch: arch.family)
def test_a_continuation_is_plain_decode(arch: Architecture) -> None:
    model, prompt = Seeded(arch, 3), (1, 0, 1, 1)
    run = Oracle()(Case(model, prompt, stops=Stops(LOOKAHEAD), dtype="float64"))
    assert continuation(model, prompt) == run.output
    assert first_law(model, prompt, 0.0) == ()
    scored = run.steps[0].scored
    assert scored is not None
    weights = np.exp(scored.logits[0] / 0.7 - (scored.logits[0] / 0.7).max())
    np.testing.assert_allclose(first_law(model, prompt, 0.7), np.sort(weights / weights.sum())[::-1], atol=1e-11)


def test_no_continuation_goes_beyond_the_longest_sequence() -> None:
    with pytest.raises(Malformed):
        continuation(FOUR_TOKENS, (1, 2, 3) * 3)
