"""Every invariant on every backend: what `pytest -m cuda` or `-m npu` selects on a hardware runner."""

import pytest
from hypothesis import given, settings

from properties.invariants import ALL
from properties.strategies import cases, session_cases
from properties.strategies.cases import single_cases
from reference.case import Case
from specverify.pytest_plugin import BackendUnderTest

LAYOUTS = {
    "attention.page-permutation": "paged",
    "cache.page-boundary": "paged",
    "cache.allocator-conserves": "paged",
    "cache.prefix-reuse": "prefix",
}
"""Invariants that speak of one kind of layout alone."""

ROUNDS = (1, 4, 16)
"""How often as many cases are drawn, in turn, until one was judged: some invariants speak of few."""


@pytest.mark.parametrize("name", [one.name for one in ALL])
def test_invariant_holds(backend: BackendUnderTest, name: str) -> None:
    outcomes: set[str] = set()
    invariant = next(one for one in ALL if one.name == name)
    alone = invariant.speaks_of == "request" and not invariant.looks_at_run  # it says nothing of sessions
    kind = session_cases if invariant.speaks_of == "session" else single_cases if alone else cases
    drawn = kind(backend.dtypes, layout=LAYOUTS.get(name), within=backend.declaration)

    def holds(case: Case) -> None:
        outcomes.add(backend.check(case, name).outcomes[name])

    for times in ROUNDS:
        settings(max_examples=times * settings().max_examples)(given(drawn)(holds))()
        if "checked" in outcomes:
            break
    assert "checked" in outcomes, f"{name} was never judged: {sorted(outcomes)}"


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_16_bit_runs_show_no_gross_error_and_no_leak(backend: BackendUnderTest, dtype: str) -> None:
    if dtype not in backend.declaration.dtypes:
        pytest.skip(f"{backend.name} declares no {dtype}")

    @given(cases((dtype,), within=backend.declaration))
    def holds(case: Case) -> None:
        backend.check(case)

    holds()
