"""A tie is looked for where the choice is made: after the processing of logits."""

from dataclasses import replace

import numpy as np
import pytest

from specverify.properties.invariants.own_laws import are_decided, stretched
from specverify.properties.tolerance.closeness import chain_step
from specverify.reference.case import Case
from specverify.reference.sampling import Sampling
from specverify.reference.trace import Scored, Step
from tests.models import LLAMA

PENALISED = Sampling(repetition_penalty=1.3)
CASE = Case(LLAMA, (1, 2, 3), sampling=PENALISED)


def step_with(logits: tuple[float, ...]) -> Step:
    rows = np.full((1, LLAMA.vocab_size), -9.0)
    rows[0, : len(logits)] = logits
    return replace(chain_step((1, 2), (3,)), scored=Scored(rows))


@pytest.mark.parametrize(
    ("logits", "decided"),
    [
        ((0.0, 1.3, -9.0, -9.0, 1.0), False),  # token 1 is in the prompt, so that its 1.3 becomes 1.0
        ((0.0, 1.3, -9.0, -9.0, 0.5), True),
        ((0.0, 1.0, -9.0, -9.0, 1.0), True),
    ],
)
def test_a_penalty_makes_and_breaks_ties(logits: tuple[float, ...], decided: bool) -> None:
    assert are_decided(CASE, step_with(logits), [0], 1e-3) == decided


def test_a_penalty_stretches_the_noise() -> None:
    assert stretched(CASE, 1.0) == pytest.approx(1.3)
    assert stretched(replace(CASE, sampling=Sampling(repetition_penalty=0.5)), 1.0) == pytest.approx(2.0)
    assert stretched(replace(CASE, sampling=Sampling()), 1.0) == 1.0
