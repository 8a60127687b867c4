"""Every invariant on every backend: what `pytest -m cuda` or `-m npu` selects on a hardware runner."""

import pytest
from hypothesis import settings

from specverify.conformance.drawn import hold_in, outcomes_of
from specverify.properties.invariants import ALL
from specverify.pytest_plugin import BackendUnderTest


@pytest.mark.parametrize("name", [invariant.name for invariant in ALL])
def test_invariant_holds(backend: BackendUnderTest, name: str) -> None:
    outcomes = outcomes_of(backend, name, settings())
    assert "checked" in outcomes, f"{name} was never judged: {sorted(outcomes)}"


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_16_bit_runs_show_no_gross_error_and_no_leak(backend: BackendUnderTest, dtype: str) -> None:
    hold_in(backend, dtype, settings())
