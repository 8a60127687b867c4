"""Resolution: the smallest shift of a law that a stream of bets could have seen.

Every draw of a stream is a bet on an event. Under a tilted law the event has other odds, exp(theta) times those of the
law, or of equal labels. The growth of the bets under a tilt says whether the stream would have shown it.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from specverify.properties.bet_group import Z
from specverify.reference.trace import Array

GRID = np.concatenate([sign * 0.02 * 1.3 ** np.arange(24) for sign in (1.0, -1.0)])
"""Tilts for which a stream keeps its growth: 24 upwards from .02 to 8.3, then 24 downwards."""

LIKELIEST, ACCEPTANCE = "the likeliest token", "acceptance"
"""Names of the events on which bets are."""

LEAST = 1e-9
"""The largest shift per draw that counts as none: what rounding leaves of a certain event."""


@dataclass(frozen=True)
class Resolution:
    """The gains of a stream's bets under each tilt of GRID; all figures add up over bets.

    Attributes:
        draws: Number of bets.
        growth: Expected logarithm of the e-value under each tilt.
        variance: Variance of that logarithm.
        shift: Total variation between the tilted law of a bet and its law, summed over bets.
        about: Names of the events on which the bets are: LIKELIEST, ACCEPTANCE; empty without draws.
    """

    draws: int = 0
    growth: tuple[float, ...] = (0.0,) * len(GRID)
    variance: tuple[float, ...] = (0.0,) * len(GRID)
    shift: tuple[float, ...] = (0.0,) * len(GRID)
    about: tuple[str, ...] = ()

    def __add__(self, other: "Resolution") -> "Resolution":
        growth, variance, shift = (
            tuple((np.array(first) + np.array(second)).tolist())
            for first, second in zip(self._arrays(), other._arrays(), strict=True)
        )
        about = tuple(sorted({*self.about, *other.about}))
        return Resolution(self.draws + other.draws, growth, variance, shift, about)

    def times(self, count: float) -> "Resolution":
        """The resolution of `count` such streams, one after the other; `count` need not be whole."""
        growth, variance, shift = (tuple((count * np.array(array)).tolist()) for array in self._arrays())
        return Resolution(round(self.draws * count), growth, variance, shift, self.about)

    def _arrays(self) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
        return self.growth, self.variance, self.shift

    def smallest(self, bar: float) -> float:
        """The smallest shift per draw, 0 to 1, whose evidence reaches e^`bar` with probability .99.

        It is 1 without draws, and where no tilt moves any of them, since each event was certain.

        The evidence of many bets is taken as normal, so that the figure is an approximation; no false-alarm rate
        depends on it. The larger figure of the two directions counts. A direction in which no tilt is seen gives the
        largest shift that it holds.
        """
        if max(self.shift) <= LEAST * self.draws:
            return 1.0
        excess = np.array(self.growth) - Z * np.sqrt(np.array(self.variance)) - bar
        shift = np.array(self.shift) / self.draws
        half = len(GRID) // 2
        return float(max(_crossing(excess[:half], shift[:half]), _crossing(excess[half:], shift[half:])))


def _crossing(excess: Array, shift: Array) -> float:
    """The shift at which `excess` first reaches 0, between two points of the grid on a straight line."""
    index = int(np.argmax(excess >= 0)) if (excess >= 0).any() else -1
    if index == -1:
        return float(shift[-1])
    if index == 0:
        return float(shift[0])
    fraction = -excess[index - 1] / (excess[index] - excess[index - 1])
    return float(shift[index - 1] + fraction * (shift[index] - shift[index - 1]))


class ResolutionSums:
    """The resolution of a stream while its bets on one event arrive."""

    def __init__(self, about: str = LIKELIEST) -> None:
        self._about = about
        self._draws = 0
        self._sums = np.zeros((3, len(GRID)))

    def add_event(self, p: float, low: float, high: float) -> None:
        """Take one bet on an event of probability `p`, known to lie between `low` and `high`."""
        tilted = p * np.exp(GRID) / (1.0 + p * np.expm1(GRID))
        cost = np.log1p(np.where(GRID > 0, min(high, 1.0), max(low, 0.0)) * np.expm1(GRID))
        self._draws += 1
        # The logarithm of the e-value is GRID - lost where the event came, and -lost where it did not.
        # Rounding may lift the tilted probability of a certain event above 1.
        variance = GRID**2 * tilted * np.maximum(1.0 - tilted, 0.0)
        self._sums += np.stack([tilted * GRID - cost, variance, np.abs(tilted - p)])

    def add_labels(self, marked: int, total: int) -> None:
        """Take one bet on whether the engine's token is among the `marked` ones of `total` tokens, each equally likely.

        The shift is told for the law of the engine's token: that of the label is smaller, since its partners come from
        the law with which the token is compared.
        """
        self._draws += 1
        self._sums += _label_sums(marked, total)

    @property
    def draws(self) -> int:
        """Number of bets so far."""
        return self._draws

    @property
    def resolution(self) -> Resolution:
        """The resolution so far."""
        growth, variance, shift = (tuple(sums.tolist()) for sums in self._sums)
        return Resolution(self._draws, growth, variance, shift, (self._about,) if self._draws else ())


@cache
def _label_sums(marked: int, total: int) -> Array:
    """Growth, variance and shift of a bet on labels [3, len(GRID)]."""
    tilted = np.exp(GRID) / (total - marked + marked * np.exp(GRID))
    unmarked = 1.0 / (total - marked + marked * np.exp(GRID))
    gains = np.log(total * np.stack([tilted, unmarked]))
    weights = np.stack([marked * tilted, (total - marked) * unmarked])
    growth = (weights * gains).sum(axis=0)
    variance = np.maximum((weights * gains**2).sum(axis=0) - growth**2, 0.0)
    return np.stack([growth, variance, np.abs(weights[0] - marked / total) * total / (total - 1)])
