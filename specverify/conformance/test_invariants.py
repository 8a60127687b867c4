"""Every invariant on the named engine, on cases within its declaration.

An invariant that needs a stage which the engine does not reveal is skipped with the stage; so is one that has nothing
to say of its cases. The first test is never skipped: every case that it draws must be compared with something.
"""

import pytest

from specverify.conformance.drawn import ROUNDS, hold_in, invariant_named, judge_all, outcomes_of
from specverify.properties.invariants import ALL
from specverify.pytest_plugin import BackendUnderTest

CASES = 20
"""Cases that are drawn for all invariants at once."""


def test_every_drawn_case_is_judged_and_agrees(backend: BackendUnderTest) -> None:
    """All invariants on CASES drawn cases, of which none goes uncompared."""
    assert judge_all(backend, CASES)


@pytest.mark.parametrize("name", [invariant.name for invariant in ALL])
def test_invariant_holds(backend: BackendUnderTest, name: str) -> None:
    """The invariant holds on every drawn case, and compares something in one of them, or says why it cannot."""
    missing = invariant_named(name).needs - backend.declaration.reveals
    if missing:
        pytest.skip(f"{backend.name} reveals no {', '.join(stage.word for stage in sorted(missing))}")
    outcomes = outcomes_of(backend, name, rounds=ROUNDS[:2])
    if "checked" not in outcomes:
        pytest.skip(f"{name} compared nothing on {backend.name}: {', '.join(sorted(outcomes)) or 'no case'}")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_runs_show_no_gross_error_and_no_leak(backend: BackendUnderTest, dtype: str) -> None:
    """All invariants in a dtype of 16 bits, where the engine declares it."""
    hold_in(backend, dtype)
