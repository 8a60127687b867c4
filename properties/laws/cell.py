"""Cell: the box of tapes around one tape on which a black box decides the same.

A cell is found by bisection (`bisected`) and cut until its probes agree (`proven`).
"""

from collections.abc import Callable

import numpy as np

from properties.laws.black_box import Asked
from reference.trace import Array

WITNESSES = 16
"""Tapes on which the two ends of an axis must give what the point between them gives, if a backend reports no cell."""

ROUNDS = 64
"""Number of cuts after which a cell that still fails its probes is halved instead."""


def probes(asked: Asked, low: Array, high: Array, corners: int) -> Array:
    """Places int64 [corners + 1, boxes, coins] in each box: random corners, each with its opposite, and one inside.

    On every axis, one of two opposite corners has the first place and the other the last. An interval that reaches too
    far along an axis is so caught at its end, even where it reaches too far by one place.
    """
    half = asked.rng.random(((corners + 1) // 2, *low.shape)) < 0.5
    pick = np.stack([half, ~half], axis=1).reshape(2 * len(half), *low.shape)[:corners]
    return np.concatenate([np.where(pick, low, high - 1), asked.within(low, high)[None]])


def bisected(asked: Asked, low: Array, high: Array, point: Array, settled: Array) -> tuple[Array, Array]:
    """Intervals around `point` in which nothing changes, for boxes of a backend that reports no cells.

    An axis is narrowed until its ends give what the point gives on every witness: a tape with the point's coins on
    earlier axes and any of the box's coins on later axes. By induction over the axes, the product of the intervals then
    has one outcome, also where a decision along an axis does not show in the outcome of the point itself (such as which
    of two rejected tokens was drafted). The probes look for decisions that no witness shows.

    Args:
        asked: The black box.
        low: First places, int64 [boxes, coins].
        high: One beyond the last.
        point: A place inside each.
        settled: Number of leading axes, int64 [boxes], that are known to be narrow enough.
    """
    first, last = low.copy(), high - 1
    box, axis = np.nonzero((np.arange(low.shape[1]) >= settled[:, None]) & (high - low > 1))
    if not len(box):
        return first, last + 1
    wide = (len(box), WITNESSES, low.shape[1])
    beneath, beyond = (np.broadcast_to(side[box, None], wide) for side in (low, high))
    # Coins at the ends of the box show decisions that random coins hide: with a coin of 0 a sampler accepts wherever it
    # can. Witness 0 lies at the lower ends, witness 2 at the upper ones; other even ones are random, odd ones mixed.
    kind = asked.rng.integers(5, size=wide)
    kind[:, ::2] = 4
    kind[:, 0], kind[:, 2] = 0, 1
    witness = np.choose(kind, [beneath, beyond - 1, beneath, beyond - 1, asked.within(beneath, beyond)])
    witness = np.where(np.arange(wide[2]) <= axis[:, None, None], point[box, None], witness)

    def ask(at: Array, which: Array, value: Array) -> Array:
        places = witness[at, which]
        places[np.arange(len(at)), axis[at]] = value
        return asked(places)

    middle = point[box, axis]
    base = ask(*_crossed(np.arange(len(box))), np.repeat(middle, WITNESSES)).reshape(-1, WITNESSES)
    # Both ends of all (box, axis) pairs in one array: end e of pair i is row e * pairs + i.
    pair = np.tile(np.arange(len(box)), 2)
    end = np.concatenate([first[box, axis], last[box, axis]])
    rows = np.nonzero(end != middle[pair])[0]
    while len(rows):
        differs = ask(*_crossed(pair[rows]), np.repeat(end[rows], WITNESSES)).reshape(-1, WITNESSES) != base[pair[rows]]
        rows, which = rows[differs.any(axis=1)], differs[differs.any(axis=1)].argmax(axis=1)
        at = pair[rows]

        def asks(some: Array, mid: Array, at: Array = at, which: Array = which) -> Array:
            return np.asarray(ask(at[some], which[some], mid) == base[at[some], which[some]])

        end[rows] = flip(middle[at], end[rows], asks)[0]
        rows = rows[end[rows] != middle[at]]
    first[box, axis], last[box, axis] = np.split(end, 2)
    return first, last + 1


def _crossed(rows: Array) -> tuple[Array, Array]:
    """Indices that pair each row with each witness."""
    return np.repeat(rows, WITNESSES), np.tile(np.arange(WITNESSES), len(rows))


def flip(same: Array, other: Array, asks: Callable[[Array, Array], Array]) -> tuple[Array, Array]:
    """Bisect all rows together, between a place where `asks(rows, places)` is true and a place where it is false.

    Returns:
        The last place of each row where it is true, and the neighbouring place where it is false.
    """
    same, other = same.copy(), other.copy()
    while len(rows := np.nonzero(np.abs(same - other) > 1)[0]):
        mid = (same[rows] + other[rows]) // 2
        holds = asks(rows, mid)
        same[rows] = np.where(holds, mid, same[rows])
        other[rows] = np.where(holds, other[rows], mid)
    return same, other


def proven(
    asked: Asked, low: Array, high: Array, point: Array, labels: Array, corners: int
) -> tuple[Array, Array, Array]:
    """Cells cut until all their probes agree with `labels`, and how often each cell was cut; each keeps its point.

    A probe that differs is walked to the point one coin at a time, the last axis first. The axis on which the outcome
    changes is bisected, and the cell ends there.
    """
    low, high, coins = low.copy(), high.copy(), low.shape[1]
    cuts = np.zeros(len(low), dtype=np.int64)
    left = np.arange(len(low))
    while len(left):
        places = probes(asked, low[left], high[left], corners)
        answers = asked(places.reshape(-1, coins)).reshape(len(places), -1)
        differs = answers != labels[left]
        bad = differs.any(axis=0)
        which = differs.argmax(axis=0)[bad]
        probe, answer = places[which, bad], answers[which, bad]
        left = left[bad]
        if not len(left):
            break
        cuts[left] += 1
        # [coins + 1, boxes, coins]: step j has the point's coins before axis j and the probe's from axis j on.
        keeps = np.arange(coins) < np.arange(coins + 1)[:, None]
        steps = np.where(keeps[:, None], point[left], probe)
        again = asked(steps.reshape(-1, coins)).reshape(coins + 1, -1)
        # Both ends of the walk were asked before: another answer now makes a stray.
        for end, before in ((0, answer), (coins, labels[left])):
            for at in np.nonzero(again[end] != before)[0]:
                asked.stray(steps[end, at], int(before[at]), int(again[end, at]))
        said = again == labels[left]
        walks = said[1:] & ~said[:-1]
        axis = coins - 1 - walks[::-1].argmax(axis=0)
        real = np.nonzero(walks.any(axis=0) & (cuts[left] <= ROUNDS))[0]
        line, on = steps[axis[real], real], axis[real]

        def asks(
            rows: Array, mid: Array, line: Array = line, on: Array = on, want: Array = labels[left[real]]
        ) -> Array:
            tried = line[rows].copy()
            tried[np.arange(len(rows)), on[rows]] = mid
            return np.asarray(asked(tried) == want[rows])

        ours, theirs = flip(point[left[real], on], probe[real, on], asks)
        upper = theirs > ours
        high[left[real[upper]], on[upper]] = theirs[upper]
        low[left[real[~upper]], on[~upper]] = theirs[~upper] + 1
        _halve(low, high, point, left[cuts[left] > ROUNDS])
        left = left[walks.any(axis=0) | (cuts[left] > ROUNDS)]
    return low, high, cuts


def _halve(low: Array, high: Array, point: Array, rows: Array) -> None:
    """Halve each cell along its widest axis, and keep the half that holds its point."""
    axis = (high[rows] - low[rows]).argmax(axis=1)
    middle = (low[rows, axis] + high[rows, axis]) // 2
    upper = point[rows, axis] >= middle
    low[rows[upper], axis[upper]] = middle[upper]
    high[rows[~upper], axis[~upper]] = middle[~upper]
