"""Power: the number of samples that shows a deviation, and the reverse.

`samples_for` gives the number for a deviation, `smallest_tv` the deviation for a number, `plan` the stages of a test.
"""

import math
from dataclasses import dataclass
from functools import cache

from scipy.optimize import brentq
from scipy.special import chdtri, chndtr

from specverify.properties.laws.sampled.gate import ALPHA_RUN, log_bar

PRICE = 1.25
"""Samples of the e-process over those of a chi-square test of the same power.

With this factor, powers of .995 and .998 were measured where .99 was asked for.
"""

POWER = 0.99
"""Probability with which a deviation of the stated size is to be seen."""

STAGE_POWER = 0.995
"""Power of each of two stages; with it, both see the deviation with POWER."""

ALPHA_SCREEN = 1e-3
"""Share of tests of correct laws that the screen holds back for betting."""


@cache
def noncentrality(df: int, alpha: float, power: float = POWER) -> float:
    """The chi-square noncentrality at which a test of level alpha with `df` degrees of freedom has `power`."""
    if df < 1 or not 0.0 < alpha < power < 1.0:
        raise ValueError(f"no test of {df} degrees of freedom has level {alpha} and power {power}")
    bar = float(chdtri(df, alpha))

    def short(size: float) -> float:
        return float(1.0 - chndtr(bar, df, size)) - power

    high = bar
    # Double the upper end until the root lies below it.
    while short(high) < 0:
        high *= 2.0
    return float(brentq(short, 1e-9, high, xtol=1e-9, rtol=1e-12))


def samples_for(cells: int, tv: float, alpha: float, power: float = POWER) -> int:
    """Number of samples with which the e-process reaches 1/alpha against any law `tv` away.

    `tv` is the total variation over the cells. The sum of (P - p)^2 / p is at least 4 tv^2, with equality where |P - p|
    is proportional to p: that is the worst case, and most faults take fewer samples.
    """
    if not 0.0 < tv < 1.0:
        raise ValueError(f"{tv} is not a total variation between 0 and 1")
    if cells == 1:
        # One cell is a test of the support: one sample outside decides, and each lies outside with probability `tv`.
        return math.ceil(math.log1p(-power) / math.log1p(-tv))
    return math.ceil(PRICE * noncentrality(cells - 1, alpha, power) / (4.0 * tv * tv))


def smallest_tv(cells: int, n: int, alpha: float, power: float = POWER) -> float:
    """The smallest total variation over `cells` cells that `n` samples of the e-process show; at most 1.

    One cell holds everything that the law allows: a single sample outside shows the deviation.
    """
    if n < 1:
        return 1.0
    if cells == 1:
        return -math.expm1(math.log1p(-power) / n)
    return min(1.0, math.sqrt(PRICE * noncentrality(cells - 1, alpha, power) / (4.0 * n)))


@dataclass(frozen=True)
class Plan:
    """The number of samples of each stage of one test.

    Attributes:
        cells: Number of cells of probability above 0.
        alpha: The part of the run's false-alarm rate that this test may use.
        log_bar: Logarithm of the e-value that is a failure: tests / alpha_run.
        alpha_screen: Level of the screen.
        first: Samples after which the screen is asked.
        most: Samples at which a test that is still undecided is given up as suspect.
        chunk: Samples between two looks of the bet.
    """

    cells: int
    alpha: float
    log_bar: float
    alpha_screen: float
    first: int
    most: int
    chunk: int

    def shown_tv(self, n: int, most: int) -> float:
        """The smallest total variation that both stages show with POWER: screen at `n` samples, bet at `most`.

        An approximation, since it takes the chi-square limit; no false-alarm rate depends on it.
        """
        if self.cells == 1 or n < 1:
            return smallest_tv(self.cells, n, self.alpha)
        screened = math.sqrt(noncentrality(self.cells - 1, self.alpha_screen, STAGE_POWER) / (4.0 * n))
        return min(1.0, max(screened, smallest_tv(self.cells, most, self.alpha, STAGE_POWER)))


def plan(cells: int, tv: float, tests: int, alpha_run: float = ALPHA_RUN, alpha_screen: float = ALPHA_SCREEN) -> Plan:
    """The plan of one of `tests` tests of a run that is to show any deviation of `tv` with probability POWER.

    `first` gives the screen power .995. `most` is twice what a chi-square test at the level alpha_run / tests would
    take, 1.6 times what the e-process is certain to need.
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
