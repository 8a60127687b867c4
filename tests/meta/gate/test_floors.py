"""Floors: the least that a run of a gate must have compared."""

from collections import Counter
from pathlib import Path

import pytest

from specverify.gate.profile import Floors, load
from specverify.gate.run import below_floors
from specverify.gate.starting import start
from specverify.properties.tally import Counts, Tally


def agreeing() -> Tally:
    tally = Tally("generate", invariants={"lossless.greedy-match": Counts(checked=3, compared=9)})
    tally.cases = tally.judged = 3
    return tally


def test_a_run_without_speculation_lies_below_its_floor() -> None:
    floors = Floors(speculation=True)
    (line,) = below_floors(agreeing(), floors)
    assert line.startswith("no drafted token was seen to be accepted")
    assert below_floors(agreeing(), Floors()) == []
    told, shown, rejected = agreeing(), agreeing(), agreeing()
    told.speculation.accepted = 1
    shown.accept_lengths = Counter({0: 4, 2: 1})
    rejected.accept_lengths = Counter({0: 4})
    assert below_floors(told, floors) == below_floors(shown, floors) == []
    assert len(below_floors(rejected, floors)) == 1


@pytest.mark.parametrize("service", ["github", "gitlab"])
def test_the_first_profile_has_the_floor(service: str, tmp_path: Path) -> None:
    start(tmp_path, service)
    assert load(tmp_path / "specverify.toml").floors == Floors(judged=0.9, speculation=True)
