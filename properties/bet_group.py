"""Groups of bets on the same draws, each bet with the evidence that its fault would have given.

The groups that know the engine's draft are those of `specverify.properties.laws.sampled.draft_faults`.
"""

from dataclasses import dataclass

import numpy as np

from specverify.reference.trace import Array

Z = 2.3264
"""Standard deviations below its mean at which a normal evidence lies with probability .01."""


@dataclass(frozen=True)
class BetGroup:
    """The bets of one group over the draws of a case or of a run; all figures add up over draws.

    Attributes:
        log_es: Natural logarithm of each bet's e-value.
        growth: Expected logarithm of each bet's e-value under the law that the bet is about.
        variance: Variance of that logarithm.
        shift: Total variation between that law and the right one, summed over draws.
        placed: Number of draws on which each bet was placed: those that do not pay 1 whatever comes.
    """

    name: str
    draws: int
    log_es: tuple[float, ...]
    growth: tuple[float, ...]
    variance: tuple[float, ...]
    shift: tuple[float, ...]
    placed: tuple[float, ...]

    def __add__(self, other: "BetGroup") -> "BetGroup":
        sums = np.array([self._rows, other._rows]).sum(axis=0)
        return BetGroup(self.name, self.draws + other.draws, *(tuple(row) for row in sums.tolist()))

    @property
    def _rows(self) -> tuple[tuple[float, ...], ...]:
        return self.log_es, self.growth, self.variance, self.shift, self.placed

    def sees(self, bet: int, bar: float) -> bool:
        """Whether the fault of a bet would have brought that bet to e^`bar` with probability .99.

        The evidence of many draws is taken as normal; no false-alarm rate depends on it.
        """
        return bool(self.growth[bet] - Z * np.sqrt(self.variance[bet]) >= bar)

    def mean_shift(self, bet: int) -> float:
        """The share of draws, among those on which a bet was placed, that its fault moves."""
        return self.shift[bet] / self.placed[bet] if self.placed[bet] else 0.0


class GroupSums:
    """The figures of a group while its draws arrive."""

    def __init__(self, name: str, bets: int) -> None:
        self._name = name
        self._draws = 0
        self._sums = np.zeros((5, bets))

    @property
    def log_es(self) -> Array:
        """Natural logarithm of each bet's e-value so far, float64 [bets]."""
        return np.asarray(self._sums[0])

    @property
    def group(self) -> BetGroup:
        """The group so far."""
        return BetGroup(self._name, self._draws, *(tuple(row) for row in self._sums.tolist()))

    def add(self, pays: Array, p: Array, high: Array, token: int, first: int = 0) -> None:
        """Take one draw; the bets are made before it.

        A bet pays `pays[b, x]` for token x, divided by `most[b]`, the most that it pays on average under any law with
        no entry above `high`: with f the least payment, the sum of law(x) (pays(x) - f) is at most the sum of high(x)
        (pays(x) - f), and f itself is paid once, since a law has mass 1. So each factor has mean at most 1 given the
        past, and the product over draws is an e-process. `pays` [bets, V] is above 0; `p` [V] is the law by the
        oracle's logits, and `high` [V] the largest probabilities that a right engine's law may give. The bets are those
        of the group from number `first` on; others are not placed.
        """
        least = pays.min(axis=1)
        most = least + ((pays - least[:, None]) * high).sum(axis=1)
        gains = np.log(pays) - np.log(most)[:, None]
        law = pays * p
        law = law / law.sum(axis=1, keepdims=True)
        growth = (law * gains).sum(axis=1)
        variance = np.maximum((law * gains**2).sum(axis=1) - growth**2, 0.0)
        self._draws += not first
        shift = np.abs(law - p).sum(axis=1) / 2.0
        placed = slice(first, first + len(pays))
        self._sums[:, placed] += np.stack([gains[:, token], growth, variance, shift, (pays != 1.0).any(axis=1)])
