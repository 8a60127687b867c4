"""Chance: the coins that a sampling program asks for, read from a tape, or forked into its exact law."""

import math
from collections.abc import Callable, Hashable, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Protocol, TypeVar

from reference import tape
from reference.trace import Array

Number = Fraction | float
"""A probability: exact in the reference's own laws, a float64 where tables are too large for that."""

T = TypeVar("T", bound=Hashable)
A = TypeVar("A")


class Chance(Protocol):
    """Where a program's randomness comes from: one uniform of [0, 1) for each (kind, node), of `reference.tape.KINDS`.

    The same coin may be asked again; it keeps its value.
    """

    def below(self, kind: str, node: int, threshold: Number) -> bool:
        """Whether the coin is less than `threshold`: never at 0, always at 1."""
        ...

    def choose(self, kind: str, node: int, weights: Sequence[Number]) -> int:
        """The index at which the cumulated weights first exceed coin * total: never one of weight 0."""
        ...


def _named(kind: str, node: int) -> tuple[str, int]:
    """The coin's name: there is one bonus coin, whatever the node."""
    return (kind, 0 if kind == "bonus" else node)


def _edges(weights: Sequence[Number]) -> list[Number]:
    """Upper ends of the intervals that normalised `weights` cut [0, 1) into; ValueError where no weight is positive."""
    # Not by `sum`, which from Python 3.12 on rounds once for all floats: the last edge must be a number over itself.
    masses = list(accumulate(weights))
    if not (masses and masses[-1] > 0):
        raise ValueError("no weight is positive: there is nothing to choose")
    total = masses[-1]
    whole = total if isinstance(total, float) else Fraction(total)  # counts are weights too, and stay exact
    return [mass / whole for mass in masses]


class Taped(Chance):
    """Real coins, in the places that `reference.tape` gives them.

    Attributes:
        used: The coins consumed, (kind, node), in the order of their first use.
        margin: The smallest distance of a coin to a threshold or an inner edge of a CDF that it was compared with;
            infinite before the first. Below an engine's rounding error, another outcome is no fault.
    """

    def __init__(self, coins: Array, nodes: int) -> None:
        self._coins = coins
        self._nodes = nodes
        self.used: list[tuple[str, int]] = []
        self.margin = math.inf

    def _toss(self, kind: str, node: int) -> float:
        coin = _named(kind, node)
        if coin not in self.used:
            self.used.append(coin)
        return float(self._coins[tape.place(*coin, self._nodes)])

    def below(self, kind: str, node: int, threshold: Number) -> bool:
        """Whether the coin on the tape is less than `threshold`."""
        coin = self._toss(kind, node)
        self.margin = min(self.margin, abs(coin - float(threshold)))
        return coin < threshold

    def choose(self, kind: str, node: int, weights: Sequence[Number]) -> int:
        """Inverse CDF by ascending index."""
        coin, edges = self._toss(kind, node), _edges(weights)
        self.margin = min([self.margin, *(abs(coin - float(edge)) for edge in edges[:-1])])
        # One is found: the last edge is a number divided by itself. A weight of 0 has the edge of the index before it.
        return next(index for index, edge in enumerate(edges) if coin < edge)


class _Fork(Chance):
    """One run of a program, on which every coin is an interval that each decision narrows.

    Attributes:
        untaken: Decisions that lead to the runs branching off this one, each to be `forced` upon another.
    """

    def __init__(self, forced: tuple[int, ...]) -> None:
        self._forced = forced
        self._taken: list[int] = []
        self._interval: dict[tuple[str, int], tuple[Number, Number]] = {}
        self.untaken: list[tuple[int, ...]] = []

    @property
    def probability(self) -> Number:
        """Of this run: the coins are independent, each uniform on what is left of its interval."""
        return math.prod(high - low for low, high in self._interval.values())

    def _decide(self, coin: tuple[str, int], parts: list[tuple[A, Number, Number]]) -> A:
        """One of `parts` (answer, low, high), cut to the coin's interval; parts that are empty there do not exist."""
        low, high = self._interval.get(coin, (0, 1))
        parts = [(answer, max(low, start), min(high, end)) for answer, start, end in parts]
        parts = [part for part in parts if part[1] < part[2]]
        at = 0
        if len(parts) > 1:
            if len(self._taken) < len(self._forced):
                at = self._forced[len(self._taken)]
            else:
                self.untaken += [(*self._taken, other) for other in range(1, len(parts))]
            self._taken.append(at)
        answer, *interval = parts[at]
        self._interval[coin] = (interval[0], interval[1])
        return answer

    def below(self, kind: str, node: int, threshold: Number) -> bool:
        """Both answers, each on its side of `threshold`."""
        if threshold != threshold:
            raise ValueError(f"the {kind} coin of node {node} is compared with NaN")
        return self._decide(_named(kind, node), [(True, 0, threshold), (False, threshold, 1)])

    def choose(self, kind: str, node: int, weights: Sequence[Number]) -> int:
        """Every index of positive weight, each on its part of [0, 1)."""
        edges = _edges(weights)
        return self._decide(_named(kind, node), list(zip(range(len(edges)), [0, *edges], edges, strict=False)))


def enumerated(program: Callable[[Chance], T]) -> dict[T, Number]:
    """The exact law of what `program` returns: it is run once for each sequence of decisions that can happen.

    Exact where all thresholds and weights are fractions. The program must be deterministic but for its coins. A coin
    may decide twice: its interval remembers. No decision of probability 0 is ever taken.

    >>> enumerated(lambda chance: chance.below("accept", 1, Fraction(1, 3)))
    {True: Fraction(1, 3), False: Fraction(2, 3)}
    """
    law: dict[T, Number] = {}
    pending: list[tuple[int, ...]] = [()]
    while pending:
        run = _Fork(pending.pop())
        outcome = program(run)
        law[outcome] = law.get(outcome, 0) + run.probability
        pending += run.untaken
    return law
