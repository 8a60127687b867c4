"""Joint laws of races: which of several exponential numbers, each over a weight, is the smallest.

A race between E_1 / w_1, ..., E_n / w_n is won by k with probability w_k / (w_1 + ... + w_n). Several races may read
the same numbers. Each decided race says of every other runner k that E_k >= E_winner * w_k / w_winner. Given the
winners, the others are independent, and each is above a maximum of linear functions of the winners. So the probability
is the integral of exp(-g) over a cone of winners, where g is piecewise linear. On a cone with rays r on which g is
linear it is |det r| / (g(r_1) ... g(r_m)), an exact fraction.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import combinations, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specverify.backends.interception.errors import DecidesTooOften

Race = tuple[tuple[tuple[int, Fraction], ...], int]
"""((runner, weight), ...) with positive weights, and the winner."""

Bound = tuple[int, float, float]
"""A runner whose exponential number is at least the second and below the third."""

MOST_CONES = 4_000
"""Most cones into which one integral is cut."""

Floors = dict[int, dict[int, Fraction]]
"""floors[k][p] = c where E_k >= c * E_p for the winner p."""


@lru_cache(maxsize=1 << 14)
def probability(races: tuple[Race, ...], bounds: tuple[Bound, ...] = ()) -> Fraction:
    """The probability that independent exponential numbers give these races these winners, within these bounds.

    Raises:
        DecidesTooOften: There are more than two winners beside bounds, or the integral has too many parts.
    """
    winners = list(dict.fromkeys(winner for _, winner in races))
    floors: Floors = {}
    for runners, winner in races:
        weights = dict(runners)
        for runner, weight in runners:
            if runner != winner:
                ratio = weight / weights[winner]
                before = floors.setdefault(runner, {}).get(winner, Fraction(0))
                floors[runner][winner] = max(before, ratio)
    if not bounds:
        return _over_cones(winners, floors)
    if len(winners) > 2:
        raise DecidesTooOften("numbers that are compared with a limit decide more than two races too")
    value = _one_winner if len(winners) == 1 else _two_winners
    return Fraction(value(winners, floors, {runner: (low, high) for runner, low, high in bounds}))


def _over_cones(winners: list[int], floors: Floors) -> Fraction:
    """The probability without bounds, in fractions."""
    size = len(winners)
    place = {winner: number for number, winner in enumerate(winners)}
    cones: list[list[list[Fraction]]] = [
        [[Fraction(row == column) for column in range(size)] for row in range(size)],
    ]
    # Winners bound each other: E_k - c * E_p >= 0 is kept.
    for runner, limits in floors.items():
        for winner, ratio in limits.items():
            if runner in place:
                plane = [Fraction(0)] * size
                plane[place[runner]], plane[place[winner]] = Fraction(1), -ratio
                cones = [cone for cone in _cut(cones, plane) if sum(_dot(plane, ray) for ray in cone) >= 0]
    loser_limits = [{place[winner]: ratio for winner, ratio in floors[k].items()} for k in floors if k not in place]
    for limits in loser_limits:
        for (first, first_ratio), (second, second_ratio) in combinations(limits.items(), 2):
            plane = [Fraction(0)] * size
            plane[first], plane[second] = first_ratio, -second_ratio
            cones = _cut(cones, plane)
    total = Fraction(0)
    for cone in cones:
        below = [sum(ray) + sum(max(c * ray[p] for p, c in limits.items()) for limits in loser_limits) for ray in cone]
        total += abs(_determinant(cone)) / math.prod(below)
    return total


def _dot(plane: Sequence[Fraction], ray: Sequence[Fraction]) -> Fraction:
    return sum((x * y for x, y in zip(plane, ray, strict=True)), Fraction(0))


def _cut(cones: list[list[list[Fraction]]], plane: list[Fraction]) -> list[list[list[Fraction]]]:
    """The cones cut along a plane, so that each lies on one side."""
    waiting = list(cones)
    finished_cones: list[list[list[Fraction]]] = []
    while waiting:
        if len(waiting) + len(finished_cones) > MOST_CONES:
            raise DecidesTooOften("the same numbers decide too many races")
        cone = waiting.pop()
        sides = [_dot(plane, ray) for ray in cone]
        up, down = max(range(len(sides)), key=sides.__getitem__), min(range(len(sides)), key=sides.__getitem__)
        if sides[up] <= 0 or sides[down] >= 0:
            finished_cones.append(cone)
            continue
        # The point of the plane between two rays takes the place of each.
        middle = [sides[up] * b - sides[down] * a for a, b in zip(cone[up], cone[down], strict=True)]
        waiting += [
            [middle if row == replaced_ray else ray for row, ray in enumerate(cone)] for replaced_ray in (up, down)
        ]
    return finished_cones


def _determinant(rows: list[list[Fraction]]) -> Fraction:
    rows = [list(row) for row in rows]
    result = Fraction(1)
    for column in range(len(rows)):
        pivot = next((row for row in range(column, len(rows)) if rows[row][column]), None)
        if pivot is None:
            return Fraction(0)
        if pivot != column:
            rows[column], rows[pivot] = rows[pivot], rows[column]
            result = -result
        result *= rows[column][column]
        for row in range(column + 1, len(rows)):
            factor = rows[row][column] / rows[column][column]
            rows[row] = [x - factor * y for x, y in zip(rows[row], rows[column], strict=True)]
    return result


_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(20)
_TAIL = (0.0, 0.5, 2.0, 5.0, 12.0, 25.0, 50.0)


def _integral(function: Callable[[NDArray[Any]], NDArray[Any]], low: float, high: float, edges: list[float]) -> float:
    """The integral of a function that is smooth between `edges` and falls at least as exp(-x)."""
    inner = sorted({edge for edge in edges if low < edge < high and math.isfinite(edge)})
    points = [low, *inner]
    last = points[-1]
    points += [last + step for step in _TAIL[1:] if last + step < high]
    if math.isfinite(high):
        points.append(high)
    total = 0.0
    for begin, end in pairwise(points):
        x = (begin + end) / 2 + (end - begin) / 2 * _NODES
        total += float((function(x) * _WEIGHTS).sum()) * (end - begin) / 2
    return total


_FREE = (0.0, math.inf)


def _one_winner(winners: list[int], floors: Floors, bounds: dict[int, tuple[float, float]]) -> float:
    (winner,) = winners
    loser_ratios = {k: float(limits[winner]) for k, limits in floors.items()}
    outside = _outside({*loser_ratios, winner}, bounds)

    def density(x: NDArray[Any]) -> NDArray[Any]:
        value: NDArray[Any] = np.exp(-x)
        for k, ratio in loser_ratios.items():
            value = value * _above(ratio * x, bounds.get(k, _FREE))
        return value

    edges = [edge / ratio for k, ratio in loser_ratios.items() if ratio for edge in bounds.get(k, _FREE)]
    return outside * _integral(density, *bounds.get(winner, _FREE), edges)


def _above(lower: NDArray[Any], bound: tuple[float, float]) -> NDArray[Any]:
    """The probability that an exponential number is at least `lower`, within its bound."""
    low, high = bound
    result: NDArray[Any] = np.maximum(np.exp(-np.maximum(lower, low)) - math.exp(-high), 0.0)
    return result


def _outside(runners: set[int], bounds: dict[int, tuple[float, float]]) -> float:
    """The probability of the bounds of numbers that are in no race."""
    return math.prod(math.exp(-low) - math.exp(-high) for k, (low, high) in bounds.items() if k not in runners)


def _two_winners(winners: list[int], floors: Floors, bounds: dict[int, tuple[float, float]]) -> float:
    first, second = winners
    limits = {k: (float(c.get(first, 0)), float(c.get(second, 0))) for k, c in floors.items()}
    second_floor = limits.get(second, (0.0, 0.0))[0]
    first_floor = limits.get(first, (0.0, 0.0))[1]
    loser_limits = {k: c for k, c in limits.items() if k not in (first, second)}
    low, high = bounds.get(second, _FREE)
    # As functions of the first winner x, the numbers of the second at which anything bends: slope * x, and constants.
    slopes = [second_floor, *(1 / first_floor for _ in (0,) if first_floor)]
    slopes += [c / d for c, d in loser_limits.values() if d]
    levels = [low, high, *(edge / d for k, (_, d) in loser_limits.items() if d for edge in bounds.get(k, _FREE))]

    def inner(x: float) -> float:
        begin = max(low, second_floor * x)
        end = min(high, x / first_floor if first_floor else math.inf)
        if end <= begin:
            return 0.0

        def density(y: NDArray[Any]) -> NDArray[Any]:
            value: NDArray[Any] = np.exp(-y - x)
            for k, (c, d) in loser_limits.items():
                value = value * _above(np.maximum(c * x, d * y), bounds.get(k, _FREE))
            return value

        return _integral(density, begin, end, [slope * x for slope in slopes] + levels)

    edges = [level / slope for level in levels for slope in slopes if slope]
    edges += [edge / c for k, (c, _) in loser_limits.items() if c for edge in bounds.get(k, _FREE)]
    outer = _integral(lambda xs: np.array([inner(float(x)) for x in xs]), *bounds.get(first, _FREE), edges)
    return outer * _outside({first, second, *loser_limits}, bounds)
