"""Screen, then bet: a quick test passes most samples, and what it holds back goes on until an e-value decides."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import chdtrc, xlogy

from properties.laws.sampled.evalue import counted, law, log_evalue
from properties.laws.sampled.power import Plan
from reference.trace import Array

LEAST_EXPECTED = 5.0
"""Cells that expect fewer samples are one cell to the screen; the e-value keeps them apart."""

VERDICTS = ("pass", "fail", "suspect")
"""A suspect was held back by the screen and not decided by the bet: amber, never red."""


def g_test(counts: Array, p: Array, least: float = LEAST_EXPECTED) -> Array:
    """P-values of the likelihood-ratio (G) test of `counts` [..., cells] against `p` [..., cells].

    A screen and never a gate: its null law is the chi-square limit, with Williams' correction. Cells that expect fewer
    than `least` are pooled, with the next smallest as long as the pool does, since many sparse cells make the limit
    reject too often (6 to 24 times). 0 where a cell of probability 0 was seen; 1 where one cell is left.

    Raises:
        ValueError: See `law` and `counted`.
    """
    given = law(p)
    seen, given = np.broadcast_arrays(counted(counts), given)
    order = np.argsort(given, axis=-1, kind="stable")
    sorted_p, sorted_x = np.take_along_axis(given, order, -1), np.take_along_axis(seen, order, -1)
    n = seen.sum(axis=-1, keepdims=True)
    # Ascending, so the pool is a prefix: every cell too small, and those needed until the pool itself expects enough.
    before = np.cumsum(sorted_p, axis=-1) - sorted_p
    pooled = (n * sorted_p < least) | ((n * before < least) & (before > 0))
    kept = ~pooled & (sorted_p > 0)
    pool_p = np.where(pooled, sorted_p, 0.0).sum(axis=-1, keepdims=True)
    pool_x = np.where(pooled, sorted_x, 0.0).sum(axis=-1, keepdims=True)
    cells_p = np.concatenate([np.where(kept, sorted_p, 0.0), pool_p], axis=-1)
    cells_x = np.concatenate([np.where(kept, sorted_x, 0.0), pool_x], axis=-1)
    real = cells_p > 0
    df = real.sum(axis=-1) - 1
    expected = np.where(real, n * cells_p, 1.0)
    expected = np.where(expected > 0, expected, 1.0)
    statistic = 2.0 * np.where(real, xlogy(cells_x, cells_x / expected), 0.0).sum(axis=-1)
    flat = n[..., 0]
    spread = np.where(real, 1.0 / np.where(real, cells_p, 1.0), 0.0).sum(axis=-1) - 1.0
    statistic = statistic / (1.0 + spread / (6.0 * np.maximum(flat, 1.0) * np.maximum(df, 1)))
    values = np.where((df > 0) & (flat > 0), chdtrc(np.maximum(df, 1), np.maximum(statistic, 0.0)), 1.0)
    return np.asarray(np.where(((given <= 0) & (seen > 0)).any(axis=-1), 0.0, values))


@dataclass(frozen=True)
class Outcome:
    """How one test ended.

    Attributes:
        n: Samples it saw.
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

    The samples that the screen saw stay in the bet: Ville's inequality covers any rule of going on, so a correct law
    fails with probability plan.alpha at most, whatever the screen does.
    """

    def __init__(self, p: Array, plan: Plan, share: float = 1.0) -> None:
        """A test of law `p` [cells].

        Args:
            p: Exact probabilities; cells of probability 0 are support.
            plan: How long to sample.
            share: Probability that a trial counts for it at all (its condition).
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
        """Samples so far."""
        return int(self.counts.sum())

    @property
    def wants(self) -> int:
        """Trials until the next look; 0 when decided.

        A test of the support alone asks for few, but stays open: it listens as long as others draw.
        """
        if self.verdict is not None:
            return 0
        if self.plan.cells == 1:
            return max(0, math.ceil((self.plan.first - self.n) / self.share)) if self.share > 0 else 0
        until = self.plan.first if not self.screened else min(self.n + self.plan.chunk, self.most)
        return max(1, math.ceil((until - self.n) / self.share)) if self.share > 0 else 0

    def limit(self, trials: int) -> None:
        """Expect no more than that many trials in all; what a test then shows is stated accordingly."""
        self.most = min(self.most, int(trials * self.share))

    def add(self, counts: Array) -> str | None:
        """Take the counts [cells] of more trials, and look: the verdict, or None to go on.

        Raises:
            ValueError: It is decided already: an e-value counts at its own stopping time.
        """
        if self.verdict is not None:
            raise ValueError("this test has stopped")
        self.counts = self.counts + counted(counts)
        self.log_e = float(log_evalue(self.counts, self.p))
        if self.log_e >= self.plan.log_bar:
            self.verdict = "fail"
        elif not self.screened and self.n >= self.plan.first and self.plan.cells > 1:
            self._screen()
        elif self.screened and self.n >= self.most:
            self.verdict = "suspect"
        return self.verdict

    def close(self) -> None:
        """No more trials can be had: screen what there is, and give up what was held back."""
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
        """How it ended.

        Raises:
            ValueError: It has not.
        """
        if self.verdict is None:
            raise ValueError("this test goes on")
        shown = self.plan.shown(self.screened or self.n, max(self.n, self.most))
        return Outcome(self.n, self.log_e, self.p_screen, self.verdict, shown)


def play(
    tests: Sequence[Betting], draw: Callable[[int], Sequence[Array]], most: int | None = None
) -> tuple[Outcome, ...]:
    """Sample until every test is decided, or `most` trials are spent.

    Args:
        tests: All fed by the same trials; each stops on its own, and what comes later is not added to it.
        draw: The counts [cells] of each test in that many more trials.
        most: Trials at most; a test that has too few is screened on what it has, and states what that shows.
    """
    spent = 0
    if most is not None:
        for test in tests:
            test.limit(most)
    while wants := [test.wants for test in tests if test.wants]:
        # A condition that is rarely met would otherwise be approached in ever smaller steps.
        wanted = max(min(wants), spent // 16)
        wanted = wanted if most is None else min(wanted, most - spent)
        if wanted <= 0:
            break
        for test, counts in zip(tests, draw(wanted), strict=True):
            if test.verdict is None:
                test.add(counts)
        spent += wanted
    for test in tests:
        test.close()
    return tuple(test.outcome() for test in tests)


def screen_then_bet(draw: Callable[[int], Array], p: Array, plan: Plan) -> Outcome:
    """Test one law: `draw(n)` gives the counts [cells] of n more samples."""
    return play([Betting(p, plan)], lambda n: [draw(n)])[0]
