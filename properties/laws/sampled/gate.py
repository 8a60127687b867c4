"""The gate of a run: whether its tests together are red, and which to blame.

The e-values of a run's tests are put together in three ways. Their mean sees a fault that one test shows; it is an
e-value however the tests depend on each other (Vovk & Wang, arXiv 1912.06116). The wealth of a player who stakes a part
of it on every test in turn sees a fault that every test shows a little. The tests have coins of their own, so that the
wealth is a test martingale over the run (Shafer et al., arXiv 0912.4269). Tests that put one question to one engine are
one stream (`specverify.properties.streams`): each of the bets in them goes on from case to case.
"""

from collections.abc import Sequence

import numpy as np
from scipy.special import logsumexp

from specverify.reference.trace import Array

ALPHA_RUN = 1e-6
"""Largest probability that a run over a correct backend is red."""

STAKES = (0.3, 0.9)
"""Parts of the wealth that the player stakes on every test, each with half of the money.

Less than all, so that a test without evidence, which has an e-value near 0, does not ruin the player.
"""

MEAN_SHARE = 0.9
"""Weight of the mean beside the wealth and the streams, which grow by factors and need little weight."""

STREAM_SHARE = 0.05
"""Weight of the mean of the streams' e-values."""


def log_bar(tests: int, alpha_run: float = ALPHA_RUN) -> float:
    """Logarithm of the e-value with which one of `tests` tests makes the run red, whatever the others say."""
    if tests < 1 or not 0.0 < alpha_run < 1.0:
        raise ValueError(f"{tests} tests at a false-alarm rate of {alpha_run} have no bar")
    return float(np.log(tests) - np.log(alpha_run) - np.log(MEAN_SHARE))


def stream_bar(parts: int, streams: int) -> float:
    """Logarithm of the wealth with which one of the `parts` bets of one of `streams` streams makes the run red."""
    return float(np.log(parts) + np.log(streams) - np.log(ALPHA_RUN) - np.log(STREAM_SHARE))


def log_evidence(log_es: Array, tests: int | None = None, streams: Sequence[float] = ()) -> float:
    """Logarithm of the e-value of a run: a correct backend reaches log(1 / alpha) with probability alpha at most.

    Args:
        log_es: [tests that ran] logarithms; +inf is a support violation. Each must be the value at the test's own
            stopping time, not its largest so far.
        tests: Number of planned tests; those that did not run count as 0 in the mean. By default the tests that ran;
            give the number where the data decided how many ran.
        streams: Logarithms of the e-values of the run's streams, each over all tests of one question.

    Raises:
        ValueError: An e-value is NaN, or more tests ran than were planned.
    """
    values = _values(log_es)
    planned = len(values) if tests is None else tests
    if planned < len(values):
        raise ValueError(f"{len(values)} tests ran where {planned} were planned")
    if not len(values):
        return 0.0
    mean = float(logsumexp(values)) - np.log(planned)
    staked = [float(np.logaddexp(np.log1p(-stake), np.log(stake) + values).sum()) for stake in STAKES]
    wealth = float(logsumexp(staked)) - np.log(len(STAKES))
    # Money that is staked on no stream keeps its worth of 1.
    streamed = float(logsumexp(list(streams)) - np.log(len(streams))) if len(streams) else 0.0
    shares = np.log([MEAN_SHARE, 1.0 - MEAN_SHARE - STREAM_SHARE, STREAM_SHARE])
    return float(logsumexp(shares + np.array([mean, wealth, streamed])))


def culprits(log_es: Array, alpha: float = ALPHA_RUN) -> tuple[int, ...]:
    """Indices of the tests to blame, the strongest evidence first: e-BH, at a false-discovery rate of alpha.

    The k tests of largest E, for the largest k at which the k-th has E >= tests / (k alpha) (Wang & Ramdas,
    arXiv 2009.02824): valid under any dependence. A red run may have no culprit, if only the sum is large enough.
    """
    values = _values(log_es)
    # Largest first; equals keep their order, so that the answer depends on the values alone.
    order = np.argsort(-values, kind="stable")
    ranks = np.arange(1, len(values) + 1)
    enough = np.flatnonzero(values[order] + np.log(ranks) >= np.log(max(len(values), 1)) - np.log(alpha))
    return tuple(int(index) for index in order[: enough[-1] + 1]) if len(enough) else ()


def _values(log_es: Array) -> Array:
    values = np.asarray(log_es, dtype=np.float64)
    if values.ndim != 1 or np.isnan(values).any():
        raise ValueError("e-values are one list of numbers, none of them NaN")
    return values
