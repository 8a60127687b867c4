"""Tiers: which parameters of a test run in every gate, and which wait for `-m slow`."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def gated(values: Iterable[Any], runs: Callable[[int], bool]) -> list[Any]:
    """`values` as parameters; those whose place in the list `runs` does not admit are marked slow."""
    made = []
    for at, value in enumerate(values):
        held = value if isinstance(value, tuple) else (value,)
        made.append(pytest.param(*held, marks=[] if runs(at) else [pytest.mark.slow]))
    return made


def first(values: Iterable[Any], kept: int) -> list[Any]:
    """`values` as parameters, the first `kept` of them in every gate."""
    return gated(values, lambda at: at < kept)


def each(values: Iterable[Any], step: int) -> list[Any]:
    """`values` as parameters, one of `step` in every gate."""
    return gated(values, lambda at: at % step == 0)
