"""Screen, then bet: a quick test first, an e-value for what it holds back.

The screen passes most samples of a correct law; a test that it holds back goes on until an e-value decides. How many
samples show a deviation is its power: `samples_for` gives the number for a deviation, `smallest_tv` the deviation for a
number, `plan` the stages of a test.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy.optimize import brentq
from scipy.special import chdtrc, chdtri, chndtr, xlogy

from specverify.properties.laws.sampled.evalue import law, log_evalue, whole_counts
from specverify.properties.laws.sampled.gate import ALPHA_RUN, log_bar
from specverify.reference.trace import Array

LEAST_EXPECTED = 5.0
"""Cells that expect fewer samples are pooled for the screen; the e-value keeps them apart."""

VERDICTS = ("pass", "fail", "suspect")
"""The verdicts of a test. The screen held a suspect back and the bet did not decide it: amber, never red."""

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


def g_test(counts: Array, p: Array, least: float = LEAST_EXPECTED) -> Array:
    """P-values of the likelihood-ratio (G) test of `counts` [..., cells] against `p` [..., cells].

    A screen and never a gate: its null law is the chi-square limit, with Williams' correction. Cells that expect fewer
    than `least` samples are pooled, and so are the next smallest cells until the pool itself expects `least`: many
    sparse cells make the limit reject too often (6 to 24 times). 0 where a cell of probability 0 was seen; 1 where one
    cell is left.

    Raises:
        ValueError: See `law` and `whole_counts`.
    """
    weights = law(p)
    observed, weights = np.broadcast_arrays(whole_counts(counts), weights)
    order = np.argsort(weights, axis=-1, kind="stable")
    sorted_p, sorted_x = np.take_along_axis(weights, order, -1), np.take_along_axis(observed, order, -1)
    n = observed.sum(axis=-1, keepdims=True)
    # In ascending order the pool is a prefix: all cells that are too small, then more until the pool expects enough.
    mass_before = np.cumsum(sorted_p, axis=-1) - sorted_p
    pooled = (n * sorted_p < least) | ((n * mass_before < least) & (mass_before > 0))
    is_cell = ~pooled & (sorted_p > 0)
    pool_p = np.where(pooled, sorted_p, 0.0).sum(axis=-1, keepdims=True)
    pool_x = np.where(pooled, sorted_x, 0.0).sum(axis=-1, keepdims=True)
    cells_p = np.concatenate([np.where(is_cell, sorted_p, 0.0), pool_p], axis=-1)
    cells_x = np.concatenate([np.where(is_cell, sorted_x, 0.0), pool_x], axis=-1)
    real = cells_p > 0
    df = real.sum(axis=-1) - 1
    expected = np.where(real, n * cells_p, 1.0)
    # n may be 0: then the statistic is 0 and the p-value 1.
    expected = np.where(expected > 0, expected, 1.0)
    statistic = 2.0 * np.where(real, xlogy(cells_x, cells_x / expected), 0.0).sum(axis=-1)
    flat = n[..., 0]
    # Williams' correction: q = 1 + (sum of 1/p - 1) / (6 n df).
    spread = np.where(real, 1.0 / np.where(real, cells_p, 1.0), 0.0).sum(axis=-1) - 1.0
    statistic = statistic / (1.0 + spread / (6.0 * np.maximum(flat, 1.0) * np.maximum(df, 1)))
    values = np.where((df > 0) & (flat > 0), chdtrc(np.maximum(df, 1), np.maximum(statistic, 0.0)), 1.0)
    return np.asarray(np.where(((weights <= 0) & (observed > 0)).any(axis=-1), 0.0, values))


@dataclass(frozen=True)
class Outcome:
    """The outcome of one test.

    Attributes:
        n: Samples that the test saw.
        log_e: Logarithm of its e-value when it stopped.
        p_screen: P-value of the screen; NaN where a violation came first.
        verdict: One of VERDICTS.
        smallest_tv: Total variation over its cells that it would have shown with probability .99.
    """

    n: int
    log_e: float
    p_screen: float
    verdict: str
    smallest_tv: float


class Betting:
    """One test that grows by chunks of counts until it is decided.

    The samples that the screen saw stay in the bet: Ville's inequality covers any rule of continuing, so a correct law
    fails with probability plan.alpha at most, whatever the screen does.
    """

    def __init__(self, p: Array, plan: Plan, share: float = 1.0) -> None:
        """A test of law `p` [cells].

        Args:
            p: Exact probabilities; a sample in a cell of probability 0 is a violation of the support.
            plan: Number of samples of each stage.
            share: Probability that a trial meets the test's condition and counts.
        """
        self.p = law(p)
        self.plan = plan
        self.share = share
        self.counts: Array = np.zeros(len(self.p))
        self.p_screen = math.nan
        self.screened = 0
        self.most = plan.most
        self.verdict: str | None = None
        self.log_e = 0.0

    @property
    def n(self) -> int:
        """Number of samples so far."""
        return int(self.counts.sum())

    @property
    def wants(self) -> int:
        """Number of trials until the next look; 0 when decided.

        A test of the support alone asks for few trials but stays open: it takes counts as long as other tests draw.
        """
        if self.verdict is not None:
            return 0
        if self.plan.cells == 1:
            return max(0, math.ceil((self.plan.first - self.n) / self.share)) if self.share > 0 else 0
        goal = self.plan.first if not self.screened else min(self.n + self.plan.chunk, self.most)
        return max(1, math.ceil((goal - self.n) / self.share)) if self.share > 0 else 0

    def limit(self, trials: int) -> None:
        """Expect at most `trials` trials in all; the deviation that the test shows is stated accordingly."""
        self.most = min(self.most, int(trials * self.share))

    def add(self, counts: Array) -> str | None:
        """Take the counts [cells] of more trials; the verdict, or None while the test goes on.

        Raises:
            ValueError: The test is decided already: an e-value counts at its own stopping time.
        """
        if self.verdict is not None:
            raise ValueError("this test has stopped")
        self.counts = self.counts + whole_counts(counts)
        self.log_e = float(log_evalue(self.counts, self.p))
        if self.log_e >= self.plan.log_bar:
            self.verdict = "fail"
        elif not self.screened and self.n >= self.plan.first and self.plan.cells > 1:
            self._screen()
        elif self.screened and self.n >= self.most:
            self.verdict = "suspect"
        return self.verdict

    def close(self) -> None:
        """End the test without more trials: screen the samples there are; a test that was held back is a suspect."""
        if self.verdict is None and not self.screened:
            self._screen()
        if self.verdict is None:
            self.verdict = "suspect"

    def _screen(self) -> None:
        self.screened = max(self.n, 1)
        self.p_screen = float(g_test(self.counts, self.p))
        if self.p_screen > self.plan.alpha_screen:
            self.verdict = "pass"
        elif self.n >= self.most:
            self.verdict = "suspect"

    def outcome(self) -> Outcome:
        """The outcome of the test.

        Raises:
            ValueError: The test is not decided yet.
        """
        if self.verdict is None:
            raise ValueError("this test goes on")
        # A test of the support has no screen: it states what all its samples show.
        smallest = self.plan.shown_tv(self.screened or self.n, max(self.n, self.most))
        return Outcome(self.n, self.log_e, self.p_screen, self.verdict, smallest)


def play(
    tests: Sequence[Betting], draw: Callable[[int], Sequence[Array]], most: int | None = None
) -> tuple[Outcome, ...]:
    """Sample until every test is decided, or `most` trials are spent.

    `draw` gives the counts [cells] of each test in n more trials, which feed all tests; each stops on its own and takes
    no later ones. A test with too few samples is screened on those, and states the deviation that they show.
    """
    spent = 0
    if most is not None:
        for test in tests:
            test.limit(most)
    while wants := [test.wants for test in tests if test.wants]:
        # At least a sixteenth of the trials so far: a rarely met condition would be approached in ever smaller steps.
        num_trials = max(min(wants), spent // 16)
        num_trials = num_trials if most is None else min(num_trials, most - spent)
        if num_trials <= 0:
            break
        for test, counts in zip(tests, draw(num_trials), strict=True):
            if test.verdict is None:
                test.add(counts)
        spent += num_trials
    for test in tests:
        test.close()
    return tuple(test.outcome() for test in tests)
