"""The Dirichlet-mixture e-value of counts against exactly known probabilities.

It measures the evidence against the probabilities, and stays valid at any time at which one looks.
"""

import numpy as np
from scipy.special import gammaln, logsumexp, xlogy

from specverify.reference.trace import Array

CONCENTRATIONS = 10.0 ** np.arange(1.0, 6.51, 0.5)
"""Concentrations of the mixture: for alternatives from far off (10) to within about 1e-3 of p (10^6.5)."""

SUMS_TO = 1e-6
"""Largest distance from 1 of the sum of a test's probabilities; they are normalised afterwards."""


def law(p: Array, tolerance: float = SUMS_TO) -> Array:
    """`p` as float64 [..., cells] that sums to 1.

    Raises:
        ValueError: An entry is negative or NaN, or a sum is off by more than `tolerance`.
    """
    weights = np.asarray(p, dtype=np.float64)
    if not (weights >= 0).all():
        raise ValueError("a cell's probability is negative or NaN")
    total = weights.sum(axis=-1, keepdims=True)
    if (np.abs(total - 1.0) > tolerance).any():
        raise ValueError(f"the cells' probabilities sum to {float(total.flat[np.abs(total - 1.0).argmax()]):.9g}")
    normalised: Array = weights / total
    return normalised


def whole_counts(counts: Array) -> Array:
    """`counts` as float64, exact up to 2^53.

    Raises:
        ValueError: An entry is negative, NaN or no whole number.
    """
    values = np.asarray(counts, dtype=np.float64)
    if not ((values >= 0) & (values == np.floor(values)) & np.isfinite(values)).all():
        raise ValueError("a count is negative or no whole number")
    return values


def log_evalue(counts: Array, p: Array) -> Array:
    """Natural logarithm of the e-value of `counts` [..., cells] against `p` [..., cells]: float64 [...].

    The mean over concentrations c of the Dirichlet(c p)-multinomial likelihood divided by that of p. Each ratio is a
    nonnegative martingale with mean 1 in the stream of outcomes, so P(some time E >= 1/a) <= a (Ville): at any n, for
    any expected counts, under any rule of stopping. +inf where a cell of probability 0 was seen.

    The first outcome in a cell of tiny p is no evidence, since the prior is centred at p; the second weighs about
    1 / (p (c + n)).

    Rounding moves the value by up to about 1e-8 at n = 1e6 and 1e-6 at n = 1e8, whatever p.

    Raises:
        ValueError: See `law` and `whole_counts`.
    """
    observed, weights = whole_counts(counts), law(p)
    if observed.shape[-1] != weights.shape[-1]:
        raise ValueError(f"{observed.shape[-1]} cells were counted where {weights.shape[-1]} have a probability")
    observed, weights = np.broadcast_arrays(observed, weights)
    possible = weights > 0
    n = observed.sum(axis=-1)
    # xlogy(0, x) is 0, and impossible cells are handled by `violated` below.
    null = xlogy(observed, np.where(possible, weights, 1.0)).sum(axis=-1)
    terms = []
    for c in CONCENTRATIONS:
        prior = np.where(possible, c * weights, 1.0)
        grown = np.where(possible & (observed > 0), gammaln(prior + observed) - gammaln(prior), 0.0).sum(axis=-1)
        terms.append(gammaln(c) - gammaln(c + n) + grown - null)
    # In logarithms, since likelihood ratios overflow float64 for large n.
    mixed = logsumexp(np.stack(terms), axis=0) - np.log(len(CONCENTRATIONS))
    violated = (~possible & (observed > 0)).any(axis=-1)
    return np.asarray(np.where(violated, np.inf, mixed))
