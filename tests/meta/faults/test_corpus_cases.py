"""Cases of the corpus without a fault: each shows an error of one line of the engine that few drawn cases reach."""

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from specverify.reports import bundle
from tests.measure.mutation.engine_judge import IN_MODE, Posed, judge_mutant
from tests.measure.mutation.engine_scope import modules
from tests.measure.mutation.generate import Mutant, mutants_of
from tests.measure.mutation.known import Record
from tests.measure.mutation.loader import source_of
from tests.measure.mutation.pool import run

CASES = Path(__file__).resolve().parents[2] / "corpus" / "cases"

SHOWN_ERRORS = json.loads(Path(__file__).with_name("shown_errors.json").read_text())
"""For each case an error of the engine that it shows: where it is for the reader, and its marker, which is searched."""

BEFORE = {"more-heads-again-in-a-static-buffer": "more-heads-than-the-operator-shares"}
"""What must run before in the same process: counts of one model add up."""

MODES = {"gathered-beside-the-kernel": f"{IN_MODE}reference"}


@cache
def every() -> tuple[Mutant, ...]:
    """Every one-line error of the engine."""
    return tuple(mutant for module in modules() for mutant in mutants_of(module, source_of(module)[1])[0])


def mutant_of(name: str) -> Mutant:
    """The one mutant that SHOWN_ERRORS names."""
    place, marker = SHOWN_ERRORS[name].split()
    module, _, within = place.partition(":")
    record = Record(module, within, "", marker)
    (mutant,) = [mutant for mutant in every() if record.fits(mutant)]
    return mutant


def outcome(name: str) -> dict[str, Any]:
    """What a child comes to that judges the mutant on the case."""
    names = [*filter(None, (BEFORE.get(name),)), name]
    bundles = [bundle.load(CASES / f"{bundle_name}.json") for bundle_name in names]
    posed = tuple(Posed(saved_bundle.case, "", frozenset(), "", None) for saved_bundle in bundles)
    mutant, backend = mutant_of(name), f"{bundles[-1].backend}{MODES.get(name, '')}"

    def plainly(tell: Callable[[str], None]) -> Any:
        # Pytest would rewrite every module of ours first.
        sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "AssertionRewritingHook"]
        return judge_mutant(mutant, backend, posed, "kept", tell)

    ((_, report),) = run([(None, plainly)], 1, 60.0, lambda: False)
    returned: dict[str, Any] = report["returned"]
    return returned


def test_every_case_says_what_it_shows() -> None:
    assert sorted(SHOWN_ERRORS) == sorted(file.stem for file in CASES.glob("*.json"))
    assert all(mutant_of(name).before for name in SHOWN_ERRORS)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SHOWN_ERRORS))
def test_a_case_shows_its_error(name: str) -> None:
    report = outcome(name)
    assert report["outcome"] == "caught", report
    assert report["case"] == bundle.load(CASES / f"{name}.json").case.id
