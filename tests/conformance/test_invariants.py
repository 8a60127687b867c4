"""Every invariant on every backend: what `pytest -m cuda` or `-m npu` selects on a hardware runner."""

import pytest
from hypothesis import given, settings

from properties.invariants import ALL
from properties.strategies import cases, session_cases
from reference.case import Case
from specverify.pytest_plugin import BackendUnderTest

LAYOUTS = {
    "attention.page-permutation": "paged",
    "cache.page-boundary": "paged",
    "cache.allocator-conserves": "paged",
    "cache.prefix-reuse": "prefix",
}
"""Invariants that speak of one kind of layout alone."""


@pytest.mark.parametrize("name", [one.name for one in ALL])
def test_invariant_holds(backend: BackendUnderTest, name: str) -> None:
    outcomes: set[str] = set()
    # Invariants that speak of few cases get more draws to find them.
    rare = name in ("draft.rollback", "draft.vocabulary-map", "lossless.interruption-isolated")
    spoken = next(one.speaks_of for one in ALL if one.name == name)
    drawn = (session_cases if spoken == "session" else cases)(backend.dtypes, layout=LAYOUTS.get(name))

    @settings(max_examples=(8 if rare else 1) * settings().max_examples)
    @given(drawn)
    def holds(case: Case) -> None:
        outcomes.add(backend.check(case, name).outcomes[name])

    holds()
    assert "checked" in outcomes, f"{name} was never judged: {sorted(outcomes)}"


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_16_bit_runs_show_no_gross_error_and_no_leak(backend: BackendUnderTest, dtype: str) -> None:
    if dtype not in backend.declaration.dtypes:
        pytest.skip(f"{backend.name} declares no {dtype}")

    @settings(max_examples=3 * settings().max_examples)
    @given(cases((dtype,)))
    def holds(case: Case) -> None:
        backend.check(case)

    holds()
