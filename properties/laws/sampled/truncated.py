"""Truncation under noise: bounds of a law cut by top-k, top-p and min-p.

The logits are known only within a margin.
"""

import numpy as np

from specverify.reference.sampling import Sampling
from specverify.reference.trace import Array

SLACK = 1e-12
"""Added to the noise where masses are compared: two orders of adding float64 numbers differ by less than this."""


def band(row: Array, noise: float, sampling: Sampling) -> tuple[Array, Array]:
    """Bounds [V] of the law that `sampling` cuts from any row within `noise` of `row`, entry by entry.

    Proof. Let z be `row` and z' any row with |z'_i - z_i| <= e; banned entries are -inf in both. The order of i and j
    is the same in both rows where z_i and z_j lie more than 2e apart.

    Rank: i is kept iff fewer than k entries exceed z'_i. Only entries above z_i - 2e can, and all above z_i + 2e do:
    so i is surely kept if fewer than k others lie above z_i - 2e, and surely cut if k lie above z_i + 2e.

    Mass: among the entries kept by rank, let B be the weight exp(z') before i and A that of the others, i included;
    i is kept iff B / (B + A) < top_p. The share rises with B and falls with A. Weights lie within exp(-+e) of those of
    z. So the share is least where only entries surely kept and surely before i count for B, at their least, and all
    others that may be kept for A, at their most; and greatest the other way round.

    Share of the largest: z'_i - max z' lies within 2e of z_i - max z, and the largest is cut by neither rule.

    Law: i has w_i / (w_i + W) with W the weight of the other kept entries, of which those surely kept are at their
    least part of it and all not surely cut are at most. The scores [V] of `row` are those after penalties, bans and
    processors, divided by the temperature.
    """
    # The largest score becomes 0, so that exp cannot overflow.
    z = np.asarray(row, dtype=np.float64) - np.max(row)
    finite = np.isfinite(z)
    # `sure`: kept in every row within the noise; `cut`: kept in none. Other entries may be either.
    sure = finite.copy()
    cut = ~finite
    if 0 < sampling.top_k < len(z):
        falling = np.sort(z)
        edge = z - 2 * noise
        # The entry itself lies above its own edge where there is noise, and is not one of the others.
        sure &= _above(falling, edge) - (edge < z) < sampling.top_k
        cut |= _above(falling, z + 2 * noise) >= sampling.top_k
    weight = np.exp(z)
    if sampling.top_p < 1.0:
        least, most = _shares(z, weight, noise + SLACK, sure, ~cut)
        sure &= most < sampling.top_p - SLACK
        cut |= least >= sampling.top_p + SLACK
    if sampling.min_p > 0.0:
        least_kept = np.log(sampling.min_p)
        sure &= z - 2 * noise - SLACK >= least_kept
        cut |= z + 2 * noise + SLACK < least_kept
    swing = np.exp(noise)
    light = weight / swing
    heavy = weight * swing
    others_most = np.where(cut, 0.0, heavy).sum() - np.where(cut, 0.0, heavy)
    others_least = np.where(sure, light, 0.0).sum() - np.where(sure, light, 0.0)
    low = np.where(sure, share_of(light, others_most), 0.0)
    high = np.where(cut, 0.0, share_of(heavy, others_least))
    return low, high


def _above(ascending: Array, edge: Array) -> Array:
    """The number of entries of `ascending` above each of `edge`."""
    return np.asarray(len(ascending) - np.searchsorted(ascending, edge, side="right"))


def _shares(z: Array, weight: Array, noise: float, sure: Array, possible: Array) -> tuple[Array, Array]:
    """The least and the greatest share of the mass that may lie before each entry [V], if rank keeps that entry."""
    # Sums from the top of the sorted row, so that the mass above any score is one look-up.
    order = np.argsort(z, kind="stable")
    ascending = z[order]
    above_sure, above_may = (
        np.append(np.cumsum(np.where(mask, weight, 0.0)[order][::-1])[::-1], 0.0) for mask in (sure, possible)
    )
    surely_before = above_sure[np.searchsorted(ascending, z + 2 * noise, side="right")]
    not_after = np.searchsorted(ascending, z - 2 * noise, side="left")
    maybe_before = np.maximum(above_may[not_after] - np.where(possible, weight, 0.0), 0.0)
    surely_after = above_sure[0] - above_sure[not_after]
    swing = np.exp(noise)
    remainder = above_may[0] - surely_before
    least = share_of(surely_before / swing, remainder * swing)
    most = share_of(maybe_before * swing, (surely_after + weight) / swing)
    return least, most


def share_of(part: Array, remainder: Array) -> Array:
    """Elementwise part / (part + remainder); 0 where there is neither."""
    total = part + np.maximum(remainder, 0.0)
    return np.asarray(np.divide(part, total, out=np.zeros_like(total), where=total > 0))
