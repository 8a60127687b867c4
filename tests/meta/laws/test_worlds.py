"""Worlds of a case: their designed laws never lie on a threshold of the case's rule or settings."""

import numpy as np
import pytest

from specverify.properties.laws.worlds import world_of
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel
from specverify.reference.rules import Rule
from specverify.reference.sampling import Sampling
from specverify.reference.tree import RankTree
from tests.models import LLAMA


@pytest.mark.parametrize("single", [0.2, 0.5])
def test_no_designed_probability_lies_on_a_threshold(single: float) -> None:
    """A row of 1, 1, 1, 2 fifths holds 0.2, which rounding alone sets above or below a threshold of 0.2."""
    rule = Rule("target-only", threshold_single=single, threshold_acc=0.5)
    case = Case(LLAMA, (3, 1), LanguageModel(LLAMA, RankTree((0, 0), (0, 0))), sampling=Sampling(2.5, rule=rule))
    tied = 0
    for salt in range(60):
        world = world_of(case, str(salt))
        law = np.exp(world.target / 2.5)
        tied += bool((np.abs(law - single) < 1e-9).any())
        assert (np.abs(law - world.sampling.rule.threshold_single) > 1e-9).all()
    assert tied  # the fifths and halves are still drawn
    assert world_of(case).sampling.rule.threshold_acc == 0.5


@pytest.mark.parametrize("settings", [Sampling(1.0, min_p=0.5), Sampling(1.0, top_p=0.5)])
def test_no_designed_share_or_mass_lies_on_a_threshold(settings: Sampling) -> None:
    """A row of 1, 1, 2 quarters holds the share 0.5 of its largest, and the mass 0.5."""
    draft = LanguageModel(LLAMA, RankTree((0, 0), (0, 0)))
    case = Case(LLAMA, (3, 1), draft, sampling=settings)
    tied = 0
    for salt in range(60):
        world = world_of(case, str(salt))
        law = np.sort(np.exp(world.target), axis=-1)[:, ::-1]
        by_mass = settings.top_p < 1.0
        designed = np.cumsum(law, axis=-1) if by_mass else law / law[:, :1]
        tied += bool((np.abs(designed - 0.5) < 1e-9).any())
        threshold = world.sampling.top_p if by_mass else world.sampling.min_p
        assert (np.abs(designed - threshold) > 1e-9).all()
    assert tied
