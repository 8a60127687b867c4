"""Every family on every attention of ours: a backend that only some families reach may be wrong for the others."""

from dataclasses import replace
from itertools import islice

import pytest

from specverify.backends.registry import open_backend
from specverify.campaign.case_stream import Stream
from specverify.properties.invariants import ALL
from specverify.properties.strategies.acceptance import ORACLE
from specverify.properties.verdict.judge import judge
from specverify.reference.abilities import Abilities
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.family import FAMILIES
from specverify.reference.sampling import Stops
from specverify.setup.subjects import subject_of
from tests.drawn_families import listed_architectures
from tests.tiers import gated

BACKENDS = ("cpu-split", "cpu-split-words", "cpu-fused", "cpu-fused-flex", "cpu-measured", "cpu-recorded")
EVERY = [(backend, family) for backend in BACKENDS for family in FAMILIES]
OF_RUNS = tuple(invariant for invariant in ALL if invariant.looks_at_run or invariant.name == "lossless.completes")


def declares(within: Abilities, family: str) -> bool:
    """Whether the backend declares a drawn architecture of the family: no sinks, say, or no indexer, that it lacks."""
    architectures = listed_architectures(family)
    return any(within.outside(Case(Seeded(each, 0), (1,), stops=Stops(1))) is None for each in architectures)


@pytest.mark.parametrize(("name", "family"), gated(EVERY, lambda index: EVERY[index][1] == "mimo_v2_flash"))
def test_a_drawn_case_of_the_family_agrees(name: str, family: str) -> None:
    backend = open_backend(name)
    declaration = backend.declaration
    if not declares(declaration, family):
        pytest.skip(f"{name} declares no drawn architecture of {family}")
    drawn = Stream(11, declaration.dtypes, within=replace(declaration, families=(family,)))
    for case in islice(drawn, 2):
        verdict = judge(case, OF_RUNS, ORACLE, subject_of(backend))
        assert verdict.agreed, verdict.first
