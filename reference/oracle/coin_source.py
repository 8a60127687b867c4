"""Chance: the coins that an acceptance program asks for.

`TapeChance` reads them from a tape. `enumerate_law` runs a program once for each sequence of decisions and adds up its
exact law.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Protocol, TypeVar

from specverify.reference import tape
from specverify.reference.trace import Array

Number = Fraction | float
"""A probability: exact in the reference's own laws, a float64 where tables are too large for that."""

T = TypeVar("T", bound=Hashable)
A = TypeVar("A")


class Chance(Protocol):
    """A program's randomness: one uniform of [0, 1) for each node and each kind of `specverify.reference.tape.KINDS`.

    A coin keeps its value when a program asks for it again.
    """

    def below(self, kind: str, node: int, threshold: Number) -> bool:
        """Whether the coin is less than `threshold`: never at 0, always at 1."""
        ...

    def choose(self, kind: str, node: int, weights: Sequence[Number]) -> int:
        """The index at which the cumulated weights first exceed coin * total; an index of weight 0 is never chosen."""
        ...


def _coin_name(kind: str, node: int) -> tuple[str, int]:
    """The name of a coin: the bonus coin is the same for every node."""
    return (kind, 0 if kind == "bonus" else node)


def _edges(weights: Sequence[Number]) -> list[Number]:
    """Upper ends of the intervals that normalised `weights` cut [0, 1) into; ValueError where no weight is positive."""
    # Not by `sum`, which rounds floats once at the end from Python 3.12 on: the last edge must be exactly 1, a number
    # divided by itself.
    masses = list(accumulate(weights))
    if not (masses and masses[-1] > 0):
        raise ValueError("no weight is positive: there is nothing to choose")
    total = masses[-1]
    divisor = total if isinstance(total, float) else Fraction(total)  # int weights: `/` would turn them into floats
    return [mass / divisor for mass in masses]


class TapeChance(Chance):
    """Real coins, in the places that `specverify.reference.tape` gives them.

    Attributes:
        used_coins: The coins consumed, (kind, node), in the order of their first use.
        margin: The smallest distance between a coin and a threshold, or an inner edge of a CDF, with which it was
            compared; infinite before the first comparison. Where it lies below an engine's rounding error, another
            outcome is no fault.
    """

    def __init__(self, coins: Array, nodes: int) -> None:
        self._coins = coins
        self._nodes = nodes
        self.used_coins: list[tuple[str, int]] = []
        self.margin = math.inf

    def _toss(self, kind: str, node: int) -> float:
        coin = _coin_name(kind, node)
        if coin not in self.used_coins:
            self.used_coins.append(coin)
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
        # Always finds an index: the last edge is 1 and a coin is less. An index of weight 0 ends where the index before
        # it ends, so the coin has passed it already.
        return next(index for index, edge in enumerate(edges) if coin < edge)


class _Fork(Chance):
    """One run of a program in which each coin is an interval that every decision narrows.

    Attributes:
        open_decisions: Decisions of the runs that branch off this one; each is the `forced_decisions` of another run.
    """

    def __init__(self, forced: tuple[int, ...]) -> None:
        self._forced_decisions = forced
        self._decisions: list[int] = []
        self._interval: dict[tuple[str, int], tuple[Number, Number]] = {}
        self.open_decisions: list[tuple[int, ...]] = []

    @property
    def probability(self) -> Number:
        """The probability of this run: the product of the intervals' lengths, since the coins are independent."""
        return math.prod(high - low for low, high in self._interval.values())

    def _decide(self, coin: tuple[str, int], parts: list[tuple[A, Number, Number]]) -> A:
        """Choose one of `parts` (answer, low, high), each cut to the coin's interval; empty parts are dropped."""
        low, high = self._interval.get(coin, (0, 1))
        parts = [(answer, max(low, start), min(high, end)) for answer, start, end in parts]
        parts = [part for part in parts if part[1] < part[2]]
        choice = 0
        if len(parts) > 1:
            # Repeat the forced decisions first; from there on take the first part and note the others.
            if len(self._decisions) < len(self._forced_decisions):
                choice = self._forced_decisions[len(self._decisions)]
            else:
                self.open_decisions += [(*self._decisions, alternative) for alternative in range(1, len(parts))]
            self._decisions.append(choice)
        answer, *interval = parts[choice]
        self._interval[coin] = (interval[0], interval[1])
        return answer

    def below(self, kind: str, node: int, threshold: Number) -> bool:
        """Fork into both answers, each on its side of `threshold`."""
        if threshold != threshold:  # NaN
            raise ValueError(f"the {kind} coin of node {node} is compared with NaN")
        return self._decide(_coin_name(kind, node), [(True, 0, threshold), (False, threshold, 1)])

    def choose(self, kind: str, node: int, weights: Sequence[Number]) -> int:
        """Fork into every index of positive weight, each on its part of [0, 1)."""
        edges = _edges(weights)
        return self._decide(_coin_name(kind, node), list(zip(range(len(edges)), [0, *edges], edges, strict=False)))


def enumerate_law(program: Callable[[Chance], T]) -> dict[T, Number]:
    """The exact law of the return value of `program`, which is run once for each sequence of decisions that can happen.

    Exact where all thresholds and weights are fractions. The program must be deterministic apart from its coins. A coin
    may decide twice: the second decision sees the interval that the first left. No decision of probability 0 is ever
    taken.

    >>> enumerate_law(lambda chance: chance.below("accept", 1, Fraction(1, 3)))
    {True: Fraction(1, 3), False: Fraction(2, 3)}
    """
    law: dict[T, Number] = {}
    pending: list[tuple[int, ...]] = [()]
    while pending:
        run = _Fork(pending.pop())
        outcome = program(run)
        # Different decisions may lead to one outcome.
        law[outcome] = law.get(outcome, 0) + run.probability
        pending += run.open_decisions
    return law
