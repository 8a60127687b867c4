"""Tiers: which parameters of a test run in every gate, and which wait for `-m slow`."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def gated(values: Iterable[Any], runs: Callable[[int], bool]) -> list[Any]:
    """`values` as parameters; those whose place in the list `runs` does not admit are marked slow."""
    parameters = []
    for index, value in enumerate(values):
        fields = value if isinstance(value, tuple) else (value,)
        parameters.append(pytest.param(*fields, marks=[] if runs(index) else [pytest.mark.slow]))
    return parameters


def first(values: Iterable[Any], count: int) -> list[Any]:
    """`values` as parameters, the first `count` of them in every gate."""
    return gated(values, lambda index: index < count)


def each(values: Iterable[Any], step: int) -> list[Any]:
    """`values` as parameters, one of `step` in every gate."""
    return gated(values, lambda index: index % step == 0)
