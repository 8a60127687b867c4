"""Power: how many samples show a deviation of a given size, and which size a number of samples shows."""

import math
from dataclasses import dataclass
from functools import cache

from scipy.optimize import brentq
from scipy.special import chdtri, chndtr

from properties.laws.sampled.gate import ALPHA_RUN, log_bar

PRICE = 1.25
"""Samples of the e-process over those of a chi-square test of the same power (measured: .995 and .998 of .99)."""

POWER = 0.99
"""With which probability a deviation of the stated size is to be seen."""

STAGE_POWER = 0.995
"""Power of each of two stages, so that both see it with POWER."""

ALPHA_SCREEN = 1e-3
"""Share of correct tests that the screen holds back for betting."""


@cache
def noncentrality(df: int, alpha: float, power: float = POWER) -> float:
    """The chi-square noncentrality at which a test of level alpha with `df` degrees of freedom has `power`."""
    if df < 1 or not 0.0 < alpha < power < 1.0:
        raise ValueError(f"no test of {df} degrees of freedom has level {alpha} and power {power}")
    bar = float(chdtri(df, alpha))

    def short(size: float) -> float:
        return float(1.0 - chndtr(bar, df, size)) - power

    high = bar
    while short(high) < 0:
        high *= 2.0
    return float(brentq(short, 1e-9, high, xtol=1e-9, rtol=1e-12))


def samples_for(cells: int, tv: float, alpha: float, power: float = POWER) -> int:
    """Samples with which the e-process reaches 1/alpha against any law `tv` away (total variation over the cells).

    The sum of (P - p)^2 / p is at least 4 tv^2, with equality where |P - p| is proportional to p: that is the worst
    case, and most faults take fewer.
    """
    if not 0.0 < tv < 1.0:
        raise ValueError(f"{tv} is not a total variation between 0 and 1")
    if cells == 1:
        return math.ceil(math.log1p(-power) / math.log1p(-tv))
    return math.ceil(PRICE * noncentrality(cells - 1, alpha, power) / (4.0 * tv * tv))


def smallest_tv(cells: int, n: int, alpha: float, power: float = POWER) -> float:
    """The smallest total variation over `cells` cells that `n` samples of the e-process show; at most 1.

    Of one cell, all the law allows: what lies outside, which one sample betrays.
    """
    if n < 1:
        return 1.0
    if cells == 1:
        return -math.expm1(math.log1p(-power) / n)
    return min(1.0, math.sqrt(PRICE * noncentrality(cells - 1, alpha, power) / (4.0 * n)))


@dataclass(frozen=True)
class Plan:
    """How long one test of a run samples.

    Attributes:
        cells: Cells of probability above 0.
        alpha: What the run's false-alarm rate leaves to this test.
        log_bar: Logarithm of the e-value that is a failure: tests / alpha_run.
        alpha_screen: Level of the screen.
        first: Samples after which the screen is asked.
        most: Samples at which a test that is still undecided is given up as suspect.
        chunk: Samples between two looks in between.
    """

    cells: int
    alpha: float
    log_bar: float
    alpha_screen: float
    first: int
    most: int
    chunk: int

    def shown(self, n: int, most: int) -> float:
        """The smallest total variation that both stages show with POWER: the screen at `n` samples, the bet at `most`.

        An approximation, since it takes the chi-square limit; no false-alarm rate depends on it.
        """
        if self.cells == 1 or n < 1:
            return smallest_tv(self.cells, n, self.alpha)
        screened = math.sqrt(noncentrality(self.cells - 1, self.alpha_screen, STAGE_POWER) / (4.0 * n))
        return min(1.0, max(screened, smallest_tv(self.cells, most, self.alpha, STAGE_POWER)))


def plan(cells: int, tv: float, tests: int, alpha_run: float = ALPHA_RUN, alpha_screen: float = ALPHA_SCREEN) -> Plan:
    """The plan of one of `tests` tests of a run that is to show any deviation of `tv` with probability POWER.

    `first` gives the screen power .995; `most` is twice what a chi-square test of the run's own level would take,
    1.6 times what the e-process is certain to need.
    """
    if not 0.0 < tv < 1.0 or cells < 1:
        raise ValueError(f"no plan shows a total variation of {tv} over {cells} cells")
    alpha = alpha_run / tests
    if cells == 1:
        first = samples_for(1, tv, alpha)
        return Plan(1, alpha, log_bar(tests, alpha_run), alpha_screen, first, first, first)
    first = math.ceil(noncentrality(cells - 1, alpha_screen, STAGE_POWER) / (4.0 * tv * tv))
    unit = math.ceil(noncentrality(cells - 1, alpha, POWER) / (4.0 * tv * tv))
    most = max(2 * unit, first)
    return Plan(cells, alpha, log_bar(tests, alpha_run), alpha_screen, first, most, max(1, unit // 8))
