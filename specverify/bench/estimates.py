"""Estimates over prompts, each with its standard error.

Steps of one text depend on each other, and rounds of one prompt repeat it: prompts are what is drawn. Errors are those
of the jackknife, which leaves out one prompt at a time (Efron and Stein, The jackknife estimate of variance, 1981).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

Prompt = TypeVar("Prompt")
"""All that was measured on one prompt."""


@dataclass(frozen=True)
class Estimate:
    """An estimate.

    Attributes:
        mean: The value.
        error: Its standard error; None for fewer than two prompts.
    """

    mean: float
    error: float | None

    def above(self, least: float) -> "Estimate":
        """The estimate, or `least` if it lies below; the error stays."""
        return Estimate(max(self.mean, least), self.error)


def estimate(prompts: Sequence[Prompt], statistic: Callable[[Sequence[Prompt]], float]) -> Estimate:
    """`statistic` of all prompts, and its standard error."""
    value, count = statistic(prompts), len(prompts)
    if count < 2:
        return Estimate(value, None)
    without_one = [statistic([*prompts[:number], *prompts[number + 1 :]]) for number in range(count)]
    middle = sum(without_one) / count
    variance = (count - 1) / count * sum((other - middle) ** 2 for other in without_one)
    return Estimate(value, math.sqrt(variance))
