"""Floors: the least that a run of a gate must have compared."""

from collections import Counter
from pathlib import Path

import pytest

from specverify.gate.profile import Floors, load
from specverify.gate.run import below_floors
from specverify.gate.starting import start
from specverify.properties.tally import Counts, Tally
from specverify.properties.verdict.coverage.pair_coverage import PairCoverage


def agreeing() -> Tally:
    tally = Tally("generate", invariants={"lossless.greedy-match": Counts(checked=3, compared=9)})
    tally.cases = tally.judged = 3
    return tally


def test_a_run_without_speculation_lies_below_its_floor() -> None:
    floors = Floors(speculation=True)
    (line,) = below_floors(agreeing(), floors)
    assert line.startswith("no drafted token was seen to be accepted")
    assert below_floors(agreeing(), Floors()) == []
    counted_run, stepped_run, rejected = agreeing(), agreeing(), agreeing()
    counted_run.speculation.accepted = 1
    stepped_run.accept_lengths = Counter({0: 4, 2: 1})
    rejected.accept_lengths = Counter({0: 4})
    assert below_floors(counted_run, floors) == below_floors(stepped_run, floors) == []
    assert len(below_floors(rejected, floors)) == 1


def test_a_run_that_judged_too_few_pairs_or_counted_none_lies_below_its_floor() -> None:
    half, none = agreeing(), agreeing()
    half.pairs = PairCoverage(possible=0b1111, met=0b0101)
    (line,) = below_floors(half, Floors(pairs=0.6))
    assert line.startswith("2 of 4 pairs of what a request may have were judged")
    assert below_floors(half, Floors(pairs=0.5)) == []
    (line,) = below_floors(none, Floors(pairs=0.1))
    assert line.startswith("no pairs of what a request may have were counted")


@pytest.mark.parametrize("service", ["github", "gitlab"])
def test_the_first_profile_has_the_floor(service: str, tmp_path: Path) -> None:
    start(tmp_path, service)
    assert load(tmp_path / "specverify.toml").floors == Floors(judged=0.9, speculation=True)
