"""Forking: a function is run once for each outcome sequence of its random draws.

A sequence of outcomes is called a course; it has an exact weight, a fraction. The weights of all courses that return
the same value add up to the probability of that value.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import TypeVar

import torch

from specverify.backends.interception.errors import TooManyRuns, refuse

T = TypeVar("T", bound=Hashable)

DOUBLE = 1 << 53
"""The number of equally likely values of random.random, k / 2^53."""

GRIDS = {torch.float64: DOUBLE, torch.float32: 1 << 24, torch.float16: 1 << 11, torch.bfloat16: 1 << 8}
"""The number of equally likely values of torch.rand on the CPU, by dtype."""


class Fork:
    """One run: the first draws repeat `course`, and each later draw takes its first possible outcome.

    Attributes:
        choices: (choice, number of possibilities, description) of each draw so far that had more than one possibility.
        weight: The probability of the run so far.
    """

    def __init__(self, course: tuple[tuple[int, int, str], ...], most_draws: int) -> None:
        self.choices: list[tuple[int, int, str]] = []
        self.weight = Fraction(1)
        self._course = course
        self._most_draws = most_draws

    def branch(self, weights: Sequence[Fraction], decision: str) -> int:
        """The index of one outcome of positive weight; every other such outcome becomes a run of its own."""
        possible = [index for index, weight in enumerate(weights) if weight > 0]
        if not possible:
            raise ValueError(f"{decision}: nothing has a positive weight")
        if len(possible) == 1:
            return possible[0]
        number = len(self.choices)
        if number >= self._most_draws:
            raise TooManyRuns(f"a run of more than {self._most_draws} draws: does a loop end by chance alone?")
        choice = 0
        # A replayed draw must offer what it offered before; otherwise some randomness escapes the interception.
        if number < len(self._course):
            choice, count, before = self._course[number]
            if (count, before) != (len(possible), decision):
                refuse(f"draw {number + 1} was {before} of {count} and is {decision} of {len(possible)} when replayed")
        self.choices.append((choice, len(possible), decision))
        self.weight *= weights[possible[choice]] / sum(weights)
        return possible[choice]

    def untried_courses(self) -> list[tuple[tuple[int, int, str], ...]]:
        """The courses that share this run's beginning and differ from it in one of its free choices."""
        if len(self.choices) < len(self._course):
            refuse(f"a run of {len(self._course)} draws had {len(self.choices)} when replayed")
        # Draws before `free` are varied by the run that first made them, so every course is run exactly once.
        free = range(len(self._course), len(self.choices))
        return [
            (*self.choices[:draw], (alternative, *self.choices[draw][1:]))
            for draw in free
            for alternative in range(1, self.choices[draw][1])
        ]


def courses(run: Callable[[Fork], T], most_runs: int, most_draws: int) -> dict[T, Fraction]:
    """The law of `run`: each returned value with the sum of the weights of its courses.

    Raises:
        NotInterceptable: A replay took another course, so some draws were not seen.
        TooManyRuns: There are more runs, or more draws in one run, than allowed.
    """
    law: dict[T, Fraction] = {}
    waiting: list[tuple[tuple[int, int, str], ...]] = [()]
    runs = 0
    while waiting:
        if runs == most_runs:
            probability = float(sum(law.values()))
            raise TooManyRuns(f"more than {most_runs} runs; those so far have probability {probability:.6g}")
        fork = Fork(waiting.pop(), most_draws)
        outcome = run(fork)
        # A tensor is hashable by identity, so equal results would count as different outcomes.
        if isinstance(outcome, torch.Tensor) or not isinstance(outcome, Hashable):
            raise TypeError(f"the function returned a {type(outcome).__name__}; make it a tuple of token ids")
        runs += 1
        law[outcome] = law.get(outcome, Fraction(0)) + fork.weight
        waiting += fork.untried_courses()
    return law


@lru_cache(maxsize=1 << 16)
def places_below(threshold: float, inclusive: bool, grid: int, dtype: torch.dtype | None) -> int:
    """The number of k in 0..grid-1 with k / grid < threshold (<= if inclusive), k / grid rounded to `dtype` first."""
    if dtype is not None and grid > GRIDS.get(dtype, grid):
        # Rounding keeps the order, so the numbers below the threshold are found by bisection.
        low, high = 0, grid
        while low < high:
            middle = (low + high) // 2
            coin = torch.tensor(middle / grid, dtype=torch.float64).to(dtype).item()
            if coin < threshold or (inclusive and coin == threshold):
                low = middle + 1
            else:
                high = middle
        return low
    # No fraction equals an infinity.
    if math.isinf(threshold):
        return grid if threshold > 0 else 0
    # A float product could round across a place of the grid.
    exact = Fraction(threshold) * grid
    return min(max(math.floor(exact) + 1 if inclusive else math.ceil(exact), 0), grid)
