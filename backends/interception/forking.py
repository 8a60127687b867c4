"""Forking: a function is run once for each outcome sequence of its random draws.

A sequence of outcomes is called a course; it has an exact weight, a fraction. The weights of all courses that return
the same value add up to the probability of that value.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch

T = TypeVar("T", bound=Hashable)

DOUBLE = 1 << 53
"""The number of equally likely values of random.random, k / 2^53."""

GRIDS = {torch.float64: DOUBLE, torch.float32: 1 << 24, torch.float16: 1 << 11, torch.bfloat16: 1 << 8}
"""The number of equally likely values of torch.rand on the CPU, by dtype."""

NUMPY_DTYPES = {np.float32: torch.float32, np.float16: torch.float16}
"""The NumPy scalar types to which NumPy rounds a Python float before it compares the two (NEP 50)."""


class NotInterceptable(Exception):
    """The function uses randomness in a way that hides its law from the draws."""


class TooManyRuns(Exception):
    """The function has more courses, or longer courses, than were allowed."""


def refuse(what: str) -> NoReturn:
    """Raise NotInterceptable for `what`."""
    raise NotInterceptable(f"not interceptable: {what}; give the engine a tape of coins, or use the black-box test")


class Fork:
    """One run: the first draws repeat `course`, and each later draw takes its first possible outcome.

    Attributes:
        taken: (choice, number of possibilities, description) of each draw so far that had more than one possibility.
        weight: The probability of the run so far.
    """

    def __init__(self, course: tuple[tuple[int, int, str], ...], most_draws: int) -> None:
        self.taken: list[tuple[int, int, str]] = []
        self.weight = Fraction(1)
        self._course, self._most_draws = course, most_draws

    def branch(self, weights: Sequence[Fraction], what: str) -> int:
        """The index of one outcome of positive weight; every other such outcome becomes a run of its own."""
        possible = [at for at, weight in enumerate(weights) if weight > 0]
        if not possible:
            raise ValueError(f"{what}: nothing has a positive weight")
        if len(possible) == 1:
            return possible[0]
        number = len(self.taken)
        if number >= self._most_draws:
            raise TooManyRuns(f"a run of more than {self._most_draws} draws: does a loop end by chance alone?")
        choice = 0
        # A replayed draw must offer what it offered before; otherwise some randomness escapes the interception.
        if number < len(self._course):
            choice, count, before = self._course[number]
            if (count, before) != (len(possible), what):
                refuse(f"draw {number + 1} was {before} of {count} and is {what} of {len(possible)} when replayed")
        self.taken.append((choice, len(possible), what))
        self.weight *= weights[possible[choice]] / sum(weights)
        return possible[choice]

    def rest(self) -> list[tuple[tuple[int, int, str], ...]]:
        """The courses that share this run's beginning and differ from it in one of its free choices."""
        if len(self.taken) < len(self._course):
            refuse(f"a run of {len(self._course)} draws had {len(self.taken)} when replayed")
        # Draws before `free` are varied by the run that first made them, so every course is run exactly once.
        free = range(len(self._course), len(self.taken))
        return [
            (*self.taken[:at], (other, *self.taken[at][1:])) for at in free for other in range(1, self.taken[at][1])
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
            done = float(sum(law.values()))
            raise TooManyRuns(f"more than {most_runs} runs; those so far have probability {done:.6g}")
        fork = Fork(waiting.pop(), most_draws)
        outcome = run(fork)
        # A tensor is hashable by identity, so equal results would count as different outcomes.
        if isinstance(outcome, torch.Tensor) or not isinstance(outcome, Hashable):
            raise TypeError(f"the function returned a {type(outcome).__name__}; make it a tuple of token ids")
        runs += 1
        law[outcome] = law.get(outcome, Fraction(0)) + fork.weight
        waiting += fork.rest()
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


class Coin:
    """A uniform number, known only as far as comparisons decided it: k / grid with low <= k < high.

    A coin is not a float, so that no code can read a value that is not decided: comparisons fork, and every other
    operation is refused.
    """

    __array_ufunc__ = None
    """Set to None so that a NumPy scalar leaves a comparison to the coin."""

    def __init__(self, fork: Fork, grid: int = DOUBLE) -> None:
        self.fork, self.grid, self.low, self.high = fork, grid, 0, grid

    def decide(self, sign: str, threshold: float, dtype: torch.dtype | None = None) -> bool:
        """Whether `coin sign threshold`, for a sign of lt, le, gt or ge, with the coin rounded to `dtype` first."""
        if math.isnan(threshold):
            return False
        # `le` and `gt` cut behind the threshold, `lt` and `ge` before it.
        cut = min(max(places_below(threshold, sign in ("le", "gt"), self.grid, dtype), self.low), self.high)
        if (
            self.fork.branch((Fraction(cut - self.low), Fraction(self.high - cut)), f"a coin against {threshold!r}")
            == 0
        ):
            self.high = cut
            return sign in ("lt", "le")
        self.low = cut
        return sign in ("gt", "ge")

    def _compare(self, sign: str, other: object) -> Any:
        if isinstance(other, Coin):
            refuse("two coins compared with each other")
        if isinstance(other, (int, float, Fraction, np.integer, np.floating)):
            return self.decide(sign, float(other), NUMPY_DTYPES.get(type(other)))
        return NotImplemented

    def __lt__(self, other: object) -> Any:
        return self._compare("lt", other)

    def __le__(self, other: object) -> Any:
        return self._compare("le", other)

    def __gt__(self, other: object) -> Any:
        return self._compare("gt", other)

    def __ge__(self, other: object) -> Any:
        return self._compare("ge", other)

    # Without a hash, a coin cannot become a key that dicts and sets would compare.
    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let torch take a coin as an operand, and refuse the call: no torch function is defined on a coin here."""
        refuse(f"torch's {getattr(func, '__name__', func)} on a coin")


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refused(self: Coin, *operands: object) -> NoReturn:
        refuse(f"{name} on a coin")

    return refused


_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "divmod")
_UNARY = (
    "eq",
    "ne",
    "bool",
    "float",
    "int",
    "index",
    "complex",
    "round",
    "trunc",
    "floor",
    "ceil",
    "neg",
    "pos",
    "abs",
)
# Python looks operators up on the class, so every refusal must be set there.
for _name in (*_UNARY, *_ARITHMETIC, *(f"r{name}" for name in _ARITHMETIC)):
    setattr(Coin, f"__{_name}__", _refusing(_name))
