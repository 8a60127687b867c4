"""Cases of the corpus without a fault: each shows an error of one line of the engine that few drawn cases reach."""

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from specverify.reports import bundle
from tests.measure.mutation.engine_judge import IN_MODE, Posed, judged
from tests.measure.mutation.engine_scope import modules
from tests.measure.mutation.generate import Mutant, mutants_of
from tests.measure.mutation.known import Record
from tests.measure.mutation.loader import source_of
from tests.measure.mutation.pool import run

CASES = Path(__file__).resolve().parents[2] / "corpus" / "cases"

SHOWS = json.loads(Path(__file__).with_name("shown_errors.json").read_text())
"""For each case an error of the engine that it shows: where it is for the reader, and its marker, which is searched."""

BEFORE = {"more-heads-again-in-a-static-buffer": "more-heads-than-the-operator-shares"}
"""What must run before in the same process: counts of one model add up."""

MODES = {"gathered-beside-the-kernel": f"{IN_MODE}reference"}


@cache
def every() -> tuple[Mutant, ...]:
    """Every one-line error of the engine."""
    return tuple(one for module in modules() for one in mutants_of(module, source_of(module)[1])[0])


def mutant_of(name: str) -> Mutant:
    """The one mutant that SHOWS names."""
    place, marker = SHOWS[name].split()
    module, _, within = place.partition(":")
    record = Record(module, within, "", marker)
    (mutant,) = [mutant for mutant in every() if record.fits(mutant)]
    return mutant


def outcome(name: str) -> dict[str, Any]:
    """What a child comes to that judges the mutant on the case."""
    names = [*filter(None, (BEFORE.get(name),)), name]
    kept = [bundle.load(CASES / f"{one}.json") for one in names]
    posed = tuple(Posed(one.case, "", frozenset(), "", None) for one in kept)
    mutant, backend = mutant_of(name), f"{kept[-1].backend}{MODES.get(name, '')}"

    def plainly(tell: Callable[[str], None]) -> Any:
        # Pytest would rewrite every module of ours first.
        sys.meta_path[:] = [one for one in sys.meta_path if type(one).__name__ != "AssertionRewritingHook"]
        return judged(mutant, backend, posed, "kept", tell)

    ((_, came),) = run([(None, plainly)], 1, 60.0, lambda: False)
    returned: dict[str, Any] = came["returned"]
    return returned


def test_every_case_says_what_it_shows() -> None:
    assert sorted(SHOWS) == sorted(file.stem for file in CASES.glob("*.json"))
    assert all(mutant_of(name).before for name in SHOWS)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SHOWS))
def test_a_case_shows_its_error(name: str) -> None:
    came = outcome(name)
    assert came["outcome"] == "caught", came
    assert came["case"] == bundle.load(CASES / f"{name}.json").case.id
