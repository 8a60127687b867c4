"""The gate of a run: whether its tests together are red, and which to blame."""

import numpy as np
from scipy.special import logsumexp

from reference.trace import Array

ALPHA_RUN = 1e-6
"""Largest probability that a run over a correct backend is red."""


def log_bar(tests: int, alpha_run: float = ALPHA_RUN) -> float:
    """Logarithm of the sum that the e-values of `tests` tests must reach for red; one test alone may reach it."""
    if tests < 1 or not 0.0 < alpha_run < 1.0:
        raise ValueError(f"{tests} tests at a false-alarm rate of {alpha_run} have no bar")
    return float(np.log(tests) - np.log(alpha_run))


def red(log_es: Array, alpha_run: float = ALPHA_RUN, tests: int | None = None) -> bool:
    """Whether the e-values sum to tests / alpha_run or more.

    The mean of e-values is an e-value however the tests depend on each other (Vovk & Wang, arXiv 1912.06116), so a
    correct backend is red with probability alpha_run at most. Each must be the value at the test's own stopping time,
    not its largest so far.

    Args:
        log_es: [tests that ran] logarithms; +inf is a support violation.
        alpha_run: The false-alarm rate of the run.
        tests: Number of planned tests; those that did not run count as 0. By default the tests that ran; give the
            number where the data decided how many ran.

    Raises:
        ValueError: An e-value is NaN, or more tests ran than were planned.
    """
    values = _values(log_es)
    planned = len(values) if tests is None else tests
    if planned < len(values):
        raise ValueError(f"{len(values)} tests ran where {planned} were planned")
    if not len(values):
        return False
    # Sum against tests / alpha is the same as mean against 1 / alpha, and takes +inf as it is.
    return float(logsumexp(values)) >= log_bar(planned, alpha_run)


def culprits(log_es: Array, alpha: float = ALPHA_RUN, tests: int | None = None) -> tuple[int, ...]:
    """Indices of the tests to blame, the strongest evidence first: e-BH, at a false-discovery rate of alpha.

    The k tests of largest E, for the largest k at which the k-th has E >= tests / (k alpha) (Wang & Ramdas,
    arXiv 2009.02824): valid under any dependence. A red run may have no culprit, if only the sum is large enough.
    """
    values = _values(log_es)
    # Largest first; equals keep their order, so that the answer depends on the values alone.
    order = np.argsort(-values, kind="stable")
    planned = max(len(values), tests or 0)
    ranks = np.arange(1, len(values) + 1)
    enough = np.flatnonzero(values[order] + np.log(ranks) >= np.log(max(planned, 1)) - np.log(alpha))
    return tuple(int(at) for at in order[: enough[-1] + 1]) if len(enough) else ()


def _values(log_es: Array) -> Array:
    values = np.asarray(log_es, dtype=np.float64)
    if values.ndim != 1 or np.isnan(values).any():
        raise ValueError("e-values are one list of numbers, none of them NaN")
    return values
