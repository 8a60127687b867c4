"""Equal laws of target and draft: a rejection leaves 0, so that a rule which may reject there is not judged."""

import numpy as np
import pytest

from specverify.backends.compositions import open_cpu
from specverify.properties.laws.worlds import world_of
from specverify.properties.verdict.judge import judge
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel
from specverify.reference.rules import Rule
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.tree import RankTree
from specverify.setup.subjects import subject_of
from tests.corruption import BY_NAME, ORACLE
from tests.models import LLAMA

CHAIN = RankTree((0, 0, 1, 2), (0, 0, 0, 0))
SEEDS = 60


def case_of(rule: str, seed: int) -> Case:
    """A sampled chain of the target as its own draft."""
    sampling = Sampling(1.0, rule=Rule(rule), draws="without-replacement", seed=seed)
    return Case(LLAMA, (3, 1, 4), LanguageModel(LLAMA, CHAIN), sampling=sampling, stops=Stops(4), dtype="float64")


@pytest.mark.parametrize("rule", ["synthetic", "chain"])
def test_worlds_of_equal_laws_are_for_rules_that_accept_there(rule: str) -> None:
    worlds = [world_of(case_of(rule, seed)) for seed in range(SEEDS)]
    equal = [world for world in worlds if np.array_equal(world.target, world.drafts[0])]
    assert bool(equal) == (rule == "chain")


def test_a_draft_that_is_the_target_shows_nothing_of_such_a_rule() -> None:
    names = ("acceptance.law-exact", "acceptance.sampled-walk", "acceptance.law-joint")
    checks = tuple(BY_NAME[name] for name in names)
    for rule, expected in (("synthetic", "not_applicable"), ("chain", "checked")):
        for seed in range(6):
            verdict = judge(case_of(rule, seed), checks, ORACLE, subject_of(open_cpu()))
            assert verdict.findings == ()
            assert {verdict.outcomes[name] for name in names[:2]} == {expected}
            assert verdict.outcomes[names[2]] == "checked"
