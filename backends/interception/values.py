"""Values: what a sampler computes with a random number before it decides by it.

A value is no float, so that no code can read what is not decided. Arithmetic makes other values of the same number,
comparisons and arg-maxes decide, and every other operation is refused.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np
import torch
from scipy.integrate import quad

from specverify.backends.interception.errors import refuse
from specverify.backends.interception.forking import DOUBLE, places_below
from specverify.backends.interception.numbers import Number, Numbers
from specverify.backends.randomness.places import Draw

NUMPY_DTYPES = {np.float32: torch.float32, np.float16: torch.float16}
"""The NumPy scalar types to which NumPy rounds a Python float before it compares the two (NEP 50)."""

TINY = 1e-6
"""A summand or a limit that keeps logarithms finite and is taken for 0: as much as a law may be off."""

PLAIN, EXPONENTIAL, LOGARITHM, POWER, GROWTH = "uniform", "exponential", "logarithm", "power", "growth"
"""Kinds of values: a + b U, a + b E, a + b log E, b E^a, and b exp(a E), with E exponential."""


@dataclass(frozen=True)
class Value:
    """A monotone function of one random number.

    Attributes:
        numbers: The numbers of the run.
        number: The number U.
        draw: The draw that it came from.
        grid: The number of equally likely values of U, k / grid.
        kind: The form of the function.
        a: Its summand or exponent.
        b: Its factor.
        is_flipped: Whether E is -log(1 - U) and not -log(U).
    """

    numbers: Numbers
    number: Number
    draw: Draw | None = None
    grid: int = DOUBLE
    kind: str = PLAIN
    a: float = 0.0
    b: float = 1.0
    is_flipped: bool = False

    __array_ufunc__ = None
    """Set to None so that a NumPy scalar leaves an operation to the value."""

    @property
    def is_untouched(self) -> bool:
        """Whether it is U itself."""
        return (self.kind, self.a, self.b) == (PLAIN, 0.0, 1.0)

    # Arithmetic.

    def plus(self, summand: float) -> "Value | float":
        """This value and a float together."""
        if math.isinf(summand):
            return summand
        if self.kind in (POWER, GROWTH):
            if abs(summand) <= TINY / 1000:
                return self
            refuse(f"a sum with a {self.kind} of noise")
        return replace(self, a=self.a + summand)

    def times(self, factor: float) -> "Value | float":
        """This value a float number of times."""
        if factor == 0:
            return 0.0
        if not math.isfinite(factor):
            refuse(f"{factor} times a random number")
        summand = self.a if self.kind in (POWER, GROWTH) else self.a * factor
        return replace(self, a=summand, b=self.b * factor)

    def over_zero(self) -> float:
        """This value divided by 0: infinite, where it is positive."""
        has_sign = self.kind in (POWER, GROWTH) or (self.kind == EXPONENTIAL and abs(self.a) <= TINY)
        if not has_sign:
            refuse("a random number divided by 0")
        return math.copysign(math.inf, self.b)

    def power(self, exponent: float) -> "Value":
        """This value to a power."""
        if exponent == 1:
            return self
        if self.kind == POWER:
            return replace(self, a=self.a * exponent, b=self._positive("a power") ** exponent)
        if self.kind == EXPONENTIAL and abs(self.a) <= TINY:
            return replace(self, kind=POWER, a=exponent, b=self._positive("a power") ** exponent)
        grown = self._as_growth("a power")
        return replace(grown, a=grown.a * exponent, b=grown.b**exponent)

    def log(self) -> "Value":
        """Its logarithm."""
        if self.kind == POWER:
            return replace(self, kind=LOGARITHM, a=math.log(self._positive("a logarithm")), b=self.a)
        if self.kind == EXPONENTIAL and abs(self.a) <= TINY:
            return replace(self, kind=LOGARITHM, a=math.log(self._positive("a logarithm")), b=1.0)
        grown = self._as_growth("a logarithm")
        return replace(grown, kind=EXPONENTIAL, a=math.log(grown.b), b=grown.a)

    def exp(self) -> "Value":
        """E to its power."""
        if self.kind == LOGARITHM:
            return replace(self, kind=POWER, a=self.b, b=math.exp(self.a))
        if self.kind == EXPONENTIAL:
            return replace(self, kind=GROWTH, a=self.b, b=math.exp(self.a))
        refuse(f"exp of a {self.kind} random number")

    def clamp(self, low: float, high: float) -> "Value":
        """This value between limits, which may only keep logarithms finite."""
        if self.kind == LOGARITHM or (low <= TINY and high >= 1 - TINY):
            if self.kind == LOGARITHM and not (low <= -1 / TINY**0.5 and high >= 1 / TINY**0.5):
                refuse("clamp on noise")
            return self
        refuse(f"clamp to {low}..{high} on a random number")

    def _positive(self, decision: str) -> float:
        if self.b <= 0:
            refuse(f"{decision} of a negative random number")
        return self.b

    def _as_growth(self, decision: str) -> "Value":
        """U or 1 - U, each times a factor, as a factor of exp(-E)."""
        if self.kind == GROWTH and self.b > 0:
            return self
        if self.kind == PLAIN and self.b > 0 and abs(self.a) <= TINY:
            return replace(self, kind=GROWTH, a=-1.0, b=self.b, is_flipped=False)
        if self.kind == PLAIN and self.b < 0 and abs(self.a + self.b) <= TINY:
            return replace(self, kind=GROWTH, a=-1.0, b=-self.b, is_flipped=True)
        refuse(f"{decision} of a {self.kind} random number")

    # Its law.

    def limit(self, level: float) -> tuple[float, bool]:
        """(t, grows): where the function grows with U, it is below `level` where U < t; else where U > t."""
        if self.kind == PLAIN:
            return (level - self.a) / self.b, self.b > 0
        if self.kind in (POWER, GROWTH):
            ratio = level / self.b
            if ratio <= 0:
                # With a positive factor it is never below, with a negative one always.
                return (0.0 if self.b > 0 else 1.0), True
            exponential = _power(ratio, 1 / self.a) if self.kind == POWER else math.log(ratio) / self.a
            grows = (self.b > 0) == (self.a > 0)
        else:
            exponential = (level - self.a) / self.b
            grows = self.b > 0
            if self.kind == LOGARITHM:
                exponential = math.exp(min(exponential, 700.0))
        t, up = self._uniform(max(exponential, 0.0))
        return t, up == grows

    def _uniform(self, exponential: float) -> tuple[float, bool]:
        """(t, grows): U where E is that, and whether E grows with U."""
        below = math.exp(-exponential)
        return (-math.expm1(-exponential), True) if self.is_flipped else (below, False)

    def level(self, u: float) -> float:
        """The value of the function where U is `u`."""
        if self.kind == PLAIN:
            return self.a + self.b * u
        argument = 1 - u if self.is_flipped else u
        exponential = -math.log(argument) if argument > 0 else math.inf
        if self.kind == EXPONENTIAL:
            return self.a + self.b * exponential
        if self.kind == LOGARITHM:
            return self.a + self.b * (math.log(exponential) if exponential > 0 else -math.inf)
        if self.kind == POWER:
            return self.b * _power(exponential, self.a)
        return self.b * math.exp(min(self.a * exponential, 700.0))

    def mass_below(self, level: float) -> float:
        """The probability of a value below `level`, nothing being decided."""
        t, grows = self.limit(level)
        t = min(max(t, 0.0), 1.0)
        return t if grows else 1 - t

    # Decisions.

    def decide(self, sign: str, threshold: float, dtype: torch.dtype | None = None) -> bool:
        """Whether `value sign threshold`, for a sign of lt, le, gt or ge; U itself is rounded to `dtype` first."""
        if math.isnan(threshold):
            return False
        less = sign in ("lt", "le")
        decision = f"a random number against {threshold!r}"
        if self.is_untouched:
            # `le` and `gt` cut behind the threshold, `lt` and `ge` before it.
            count_below = places_below(threshold, sign in ("le", "gt"), self.grid, dtype)
            return self.numbers.below(self.number, self.draw, Fraction(count_below, self.grid), decision) == less
        if math.isinf(threshold):
            return (threshold > 0) == less
        t, grows = self.limit(threshold)
        below = self.numbers.below(self.number, self.draw, Fraction(t), decision)
        return (below == grows) == less

    def _compare(self, sign: str, operand: object) -> Any:
        if isinstance(operand, Value):
            if self._is_same(operand):
                return sign in ("le", "ge")
            refuse("two random numbers compared with each other")
        if isinstance(operand, (int, float, Fraction, np.integer, np.floating)):
            return self.decide(sign, float(operand), NUMPY_DTYPES.get(type(operand)))
        return NotImplemented

    def _is_same(self, operand: "Value") -> bool:
        """Whether both are the same function of one number."""
        forms = [(value.kind, value.a, value.b, value.is_flipped) for value in (self, operand)]
        return self.number is operand.number and forms[0] == forms[1]

    def __lt__(self, operand: object) -> Any:
        return self._compare("lt", operand)

    def __le__(self, operand: object) -> Any:
        return self._compare("le", operand)

    def __gt__(self, operand: object) -> Any:
        return self._compare("gt", operand)

    def __ge__(self, operand: object) -> Any:
        return self._compare("ge", operand)

    def __add__(self, operand: Any) -> Any:
        return self.plus(float(operand)) if _is_number(operand) else NotImplemented

    __radd__ = __add__

    def __sub__(self, operand: Any) -> Any:
        return self.plus(-float(operand)) if _is_number(operand) else NotImplemented

    def __rsub__(self, operand: Any) -> Any:
        return _plus(self.times(-1.0), float(operand)) if _is_number(operand) else NotImplemented

    def __mul__(self, operand: Any) -> Any:
        return self.times(float(operand)) if _is_number(operand) else NotImplemented

    __rmul__ = __mul__

    def __truediv__(self, operand: Any) -> Any:
        return self.times(1 / float(operand)) if _is_number(operand) else NotImplemented

    def __rtruediv__(self, operand: Any) -> Any:
        return self.power(-1.0).times(float(operand)) if _is_number(operand) else NotImplemented

    def __pow__(self, operand: Any) -> Any:
        return self.power(float(operand)) if _is_number(operand) else NotImplemented

    def __neg__(self) -> Any:
        return self.times(-1.0)

    def __floor__(self) -> int:
        """The whole number below the value, decided."""
        low, high = sorted((self.level(0.0), self.level(1.0)))
        if self.kind != PLAIN or high - low > 10_000:
            refuse("floor on a random number")
        floor = math.floor(low)
        last = math.ceil(high) - 1
        while floor < last and not self.decide("lt", floor + 1.0):
            floor += 1
        return floor

    def __int__(self) -> int:
        if min(self.level(0.0), self.level(1.0)) < 0:
            refuse("int on a random number that may be negative")
        return self.__floor__()

    # Without a hash, a value cannot become a key that dicts and sets would compare.
    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let torch take a value as an operand outside of a watched run, and refuse the call."""
        refuse(f"torch's {getattr(func, '__name__', func)} on a random number")


def _is_number(operand: object) -> bool:
    if isinstance(operand, Value):
        refuse("arithmetic of two random numbers")
    return isinstance(operand, (int, float, Fraction, np.integer, np.floating))


def _plus(value: "Value | float", summand: float) -> "Value | float":
    return value.plus(summand) if isinstance(value, Value) else value + summand


def _power(base: float, exponent: float) -> float:
    if base == 0 or math.isinf(base):
        return math.inf if (base == 0) == (exponent < 0) else 0.0
    return float(base**exponent)


def _refuse_operation(name: str) -> Callable[..., NoReturn]:
    def refuse_call(self: Value, *operands: object) -> NoReturn:
        refuse(f"{name} on a random number")

    return refuse_call


_ARITHMETIC = ("floordiv", "mod", "divmod", "rfloordiv", "rmod", "rpow", "rdivmod")
_UNARY = ("eq", "ne", "bool", "float", "index", "complex", "round", "trunc", "ceil", "pos", "abs")
# Python looks operators up on the class, so every refusal must be set there.
for _name in (*_UNARY, *_ARITHMETIC):
    setattr(Value, f"__{_name}__", _refuse_operation(_name))


def winner(row: Sequence[Any], largest: bool, decision: str) -> int:
    """Decide which of a row of values and floats is the largest, or the smallest."""
    return ranking(row, 1, largest, decision)[0]


def ranking(row: Sequence[Any], count: int, largest: bool, decision: str) -> list[int]:
    """Decide the first `count` of a row of values and floats in falling order, or in rising order."""
    sign = 1.0 if largest else -1.0
    values = [sign * value if not isinstance(value, Value) else value.times(sign) for value in row]
    drawn_values = [value for value in values if isinstance(value, Value)]
    if not drawn_values:
        return sorted(range(len(values)), key=lambda place: -values[place])[:count]
    runners = _as_race(values)
    draw = drawn_values[0].draw
    if runners is not None:
        weights, flipped = runners
        numbers = [value.number if isinstance(value, Value) else drawn_values[0].number for value in values]
        pairs = list(zip(numbers, weights, strict=True))
        if sum(weight > 0 for weight in weights) < count:
            refuse(f"the first {count} of a race of fewer")
        return drawn_values[0].numbers.ranking(pairs, count, flipped, draw, decision)
    if count > 1:
        refuse(f"{decision} of values that are no race")
    constants = [float(value) for value in values if not isinstance(value, Value)]
    floor = max(constants, default=-math.inf)
    if floor > -math.inf:
        refuse(f"{decision} among random numbers and {floor}")
    places = [place for place, value in enumerate(values) if isinstance(value, Value)]
    return [
        places[
            drawn_values[0].numbers.spend(
                [v.number for v in drawn_values], draw, lambda: _law_of_largest(drawn_values), decision
            )
        ]
    ]


def _as_race(values: Sequence[Any]) -> tuple[list[Fraction], bool] | None:
    """(weights, flipped) where the largest value is the runner with the smallest E / weight; None where it is not."""
    scores: list[tuple[str, float, Fraction] | None] = []
    flips = set()
    for value in values:
        if not isinstance(value, Value):
            scores.append(None)
            continue
        flips.add(value.is_flipped)
        scores.append(_score(value))
        if scores[-1] is None:
            return None
    known_scores = [score for score in scores if score is not None]
    families = {family for family, _, _ in known_scores}
    slopes = [slope for _, slope, _ in known_scores]
    if len(families) > 1 or len(flips) > 1 or any(abs(slope - slopes[0]) > 1e-6 * abs(slopes[0]) for slope in slopes):
        return None
    # A float in the row must be below every value whatever its number: -inf, or at most 0 beside positive values.
    lowest = 0.0 if families == {"positive"} else -math.inf
    floats = [float(value) for value in values if not isinstance(value, Value)]
    if slopes[0] >= 0 or any(constant > lowest for constant in floats):
        return None
    return [Fraction(0) if score is None else score[2] for score in scores], flips.pop()


def _score(value: Value) -> tuple[str, float, Fraction] | None:
    """(family, slope, weight): values of one family are ordered as log(weight) * -slope + slope * log E is."""
    if value.kind == LOGARITHM:
        return "logarithm", value.b, _weight(value.a, value.b)
    if value.kind == POWER or (value.kind == EXPONENTIAL and abs(value.a) <= TINY):
        exponent = value.a if value.kind == POWER else 1.0
        if value.b > 0:
            exact = Fraction(value.b) if exponent == -1 else _weight(math.log(value.b), exponent)
            return "positive", exponent, exact
        # -b E is largest where E / (1 / b) is smallest.
        exact = 1 / Fraction(-value.b) if exponent == 1 else _weight(-math.log(-value.b), -exponent)
        return "negative", -exponent, exact
    if value.kind == GROWTH and value.b == 1:
        if value.a < 0:
            return "growth", -1.0, 1 / Fraction(-value.a)
        return "growth", 1.0, Fraction(value.a)
    return None


def _weight(alpha: float, slope: float) -> Fraction:
    return Fraction(math.exp(max(min(alpha / abs(slope), 700.0), -745.0))) if alpha > -math.inf else Fraction(0)


def _law_of_largest(values: Sequence[Value]) -> list[Fraction]:
    """The probability that each of some independent values is the largest, by integration."""
    law = []
    for number, value in enumerate(values):
        rivals = [rival for place, rival in enumerate(values) if place != number]

        def density(u: float, value: Value = value, rivals: list[Value] = rivals) -> float:
            level = value.level(u)
            return math.prod(rival.mass_below(level) for rival in rivals)

        ends = [end for rival in rivals for end in (rival.level(0.0), rival.level(1.0)) if math.isfinite(end)]
        points = sorted({0.0, 1.0, *(t for t, _ in map(value.limit, ends) if 0 < t < 1)})
        mass = 0.0
        for low, high in pairwise(points):
            mass += quad(density, low, high, epsabs=1e-12, epsrel=1e-10, limit=200)[0]
        law.append(mass)
    return [Fraction(mass if mass > 1e-13 else 0.0) for mass in law]
