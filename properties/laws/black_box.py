"""A black box asked with tapes of coins on a grid, and the cells on which it decides the same.

It returns labels of the outcomes, and notices strays: requests whose outcome depends on other requests of the batch. A
cell is found by bisection (`bisect_intervals`) and cut until its probes agree (`prove_cells`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from specverify.reference.probability_world import Blocks
from specverify.reference.trace import Array

Evaluate = Callable[[Array], Blocks]
"""Function from tapes float64 [B, coins], one row for each request of a batch, to the requests' blocks."""

Signature = tuple[tuple[int, ...], tuple[int, ...]]
"""The outcome of one request: accepted rows and emitted tokens."""

CHUNK = 1 << 16
"""Most requests of one call."""

MAX_REPEATS = 64
"""Most places of a batch that are asked again in another batch."""

WITNESSES = 16
"""Tapes on which the two ends of an axis must give what the point between them gives, if a backend reports no cell."""

ROUNDS = 64
"""Number of cuts after which a cell that still fails its probes is halved instead."""

STRAYS = 16
"""Number of strays that are kept."""


@dataclass(frozen=True)
class Stray:
    """A tape whose outcome depended on its neighbours in the batch, or on the call.

    Attributes:
        other_outcome: The outcome from the same coins in another batch.
    """

    tape: tuple[float, ...]
    outcome: Signature
    other_outcome: Signature


class BlackBox:
    """The black box on the grid of coins k / grid: its axes in the order of cutting, its answers as labels.

    A place is a tape in grid units, int64 [coins]. A label is a 64-bit hash of path and tokens, with multipliers drawn
    once. `signatures` maps a label to its outcome, `first` to the place where it was first seen.
    """

    def __init__(self, evaluate: Evaluate, coins: int, grid: int, order: tuple[int, ...], seed: int) -> None:
        if coins < 1:
            raise ValueError(f"{coins} coins: a black box without coins has nothing to enumerate")
        if sorted(order) != list(range(coins)):
            raise ValueError(f"order {order} does not name each of {coins} coins once")
        if not 1 < grid <= 2**53:
            raise ValueError(f"a grid of {grid} is not in 2..2^53, where float64 is exact")
        self.coins = coins
        self.grid = grid
        self.evaluations = 0
        self.calls = 0
        self.signatures: dict[int, Signature] = {}
        self.first: dict[int, Array] = {}
        self.strays: list[Stray] = []
        self.rng = np.random.default_rng(seed)
        self._evaluate = evaluate
        self._order = np.array(order, dtype=np.int64)
        self._multipliers = np.zeros(0, dtype=np.uint64)

    def __call__(self, places: Array) -> Array:
        """Labels int64 [B] of the places int64 [B, coins]."""
        return self.cells(places)[0]

    def cells(self, places: Array) -> tuple[Array, Array | None, Array | None]:
        """Labels of the places, and the cells around them that the backend reports, or None where it reports none.

        A cell goes from low inclusive to high exclusive.
        """
        if not len(places):
            return np.zeros(0, dtype=np.int64), None, None
        parts = [self._call(places[begin : begin + CHUNK]) for begin in range(0, len(places), CHUNK)]
        labels = np.concatenate([part[0] for part in parts])
        low = [part[1] for part in parts if part[1] is not None]
        high = [part[2] for part in parts if part[2] is not None]
        if len(low) < len(parts) or len(high) < len(parts):
            return labels, None, None
        return labels, np.concatenate(low), np.concatenate(high)

    def tapes(self, places: Array) -> Array:
        """The coins at `places`, in the backend's own order."""
        tapes = np.empty(places.shape)
        # Axis i of a place is coin `order[i]` of the tape.
        tapes[:, self._order] = places / self.grid
        return tapes

    def draw_places(self, low: Array, high: Array) -> Array:
        """A random place in each box from `low` inclusive to `high` exclusive."""
        places = low + ((high - low) * self.rng.random(low.shape)).astype(np.int64)
        # Rounding in float64 may carry a wide box's draw to `high` itself.
        inside: Array = np.minimum(places, high - 1)
        return inside

    def note_stray(self, place: Array, label: int, other_label: int) -> None:
        """Note that the tape at `place` had two outcomes."""
        if len(self.strays) < STRAYS:
            tape = tuple(float(coin) for coin in self.tapes(place[None])[0])
            self.strays.append(Stray(tape, self.signatures[label], self.signatures[other_label]))

    def ask_mixed(self, places: Array, labels: Array, company: Array) -> Array:
        """Ask some of `places` again, in one shuffled batch with `company` and with as many strangers.

        A place with another answer than its label is a stray.

        Returns:
            The labels of `company`, int64 [B].
        """
        sample = self.rng.permutation(len(places))[:MAX_REPEATS]
        strangers = self.draw_places(
            np.zeros((len(sample), self.coins), dtype=np.int64), np.full(self.coins, self.grid)
        )
        crowd = np.concatenate([places[sample], strangers, company])
        order = self.rng.permutation(len(crowd))
        answers = np.empty(len(crowd), dtype=np.int64)
        answers[order] = self(crowd[order])
        for index in np.nonzero(answers[: len(sample)] != labels[sample])[0]:
            self.note_stray(places[sample[index]], int(labels[sample[index]]), int(answers[index]))
        return answers[2 * len(sample) :]

    def ask_alone(self, places: Array, labels: Array) -> None:
        """Ask two of `places` again, each in a batch of its own; a place with another answer is a stray."""
        for index in self.rng.permutation(len(places))[:2]:
            answer = self(places[index : index + 1])[0]
            if answer != labels[index]:
                self.note_stray(places[index], int(labels[index]), int(answer))

    def _call(self, places: Array) -> tuple[Array, Array | None, Array | None]:
        self.calls += 1
        self.evaluations += len(places)
        blocks = self._evaluate(self.tapes(places))
        if len(blocks.path) != len(places) or len(blocks.tokens) != len(places):
            raise ValueError(
                f"{len(blocks.path)} paths, {len(blocks.tokens)} blocks of tokens: {len(places)} were asked"
            )
        rows = np.concatenate([blocks.path, blocks.tokens], axis=1).astype(np.int64)
        while len(self._multipliers) < rows.shape[1]:
            # An odd multiplier is invertible modulo 2^64, so a product loses no information on its value.
            self._multipliers = np.append(
                self._multipliers, 2 * self.rng.integers(1 << 63, dtype=np.uint64) + np.uint64(1)
            )
        # The padding -1 becomes 1, so that every value takes part in the sum, which wraps modulo 2^64.
        labels = ((rows + 2).astype(np.uint64) * self._multipliers[: rows.shape[1]]).sum(axis=1).view(np.int64)
        path_width = blocks.path.shape[1]
        for label, row in zip(*np.unique(labels, return_index=True), strict=True):
            if int(label) not in self.signatures:
                self.signatures[int(label)] = (
                    _without_padding(rows[row, :path_width]),
                    _without_padding(rows[row, path_width:]),
                )
                self.first[int(label)] = places[row].copy()
        if blocks.low is None or blocks.high is None:
            return labels, None, None
        with np.errstate(invalid="ignore"):
            low, high = (np.ceil(side[:, self._order] * self.grid) for side in (blocks.low, blocks.high))
        # A bound that is NaN becomes an empty cell, which does not hold its place and is disputed.
        low = np.nan_to_num(low, nan=self.grid)
        high = np.nan_to_num(high, nan=0.0)
        return labels, *(np.clip(side, 0, self.grid).astype(np.int64) for side in (low, high))


def _without_padding(row: Array) -> tuple[int, ...]:
    """The row without the padding -1 at its end."""
    filled = np.nonzero(row != -1)[0]
    return tuple(int(value) for value in row[: filled[-1] + 1]) if len(filled) else ()


def probes(black_box: BlackBox, low: Array, high: Array, corners: int) -> Array:
    """Places int64 [corners + 1, boxes, coins] in each box: random corners, each with its opposite, and one inside.

    On every axis, one of two opposite corners has the first place and the other the last. An interval that reaches too
    far along an axis is so caught at its end, even where it reaches too far by one place.
    """
    half = black_box.rng.random(((corners + 1) // 2, *low.shape)) < 0.5
    pick = np.stack([half, ~half], axis=1).reshape(2 * len(half), *low.shape)[:corners]
    return np.concatenate([np.where(pick, low, high - 1), black_box.draw_places(low, high)[None]])


def bisect_intervals(black_box: BlackBox, low: Array, high: Array, point: Array, settled: Array) -> tuple[Array, Array]:
    """Intervals around `point` in which nothing changes, for boxes of a backend that reports no cells.

    An axis is narrowed until its ends give what the point gives on every witness: a tape with the point's coins on
    earlier axes and any of the box's coins on later axes. By induction over the axes, the product of the intervals then
    has one outcome, also where a decision along an axis does not show in the outcome of the point itself (such as which
    of two rejected tokens was drafted). The probes look for decisions that no witness shows. Boxes go from `low` to one
    beyond the last place, `high`, int64 [boxes, coins]. The first `settled` axes [boxes] are known to be narrow enough.
    """
    first = low.copy()
    last = high - 1
    box, axis = np.nonzero((np.arange(low.shape[1]) >= settled[:, None]) & (high - low > 1))
    if not len(box):
        return first, last + 1
    shape = (len(box), WITNESSES, low.shape[1])
    lower_ends, upper_ends = (np.broadcast_to(side[box, None], shape) for side in (low, high))
    # Coins at the ends of the box show decisions that random coins hide: with a coin of 0 a sampler accepts wherever it
    # can. Witness 0 lies at the lower ends, witness 2 at the upper ones; other even ones are random, odd ones mixed.
    kind = black_box.rng.integers(5, size=shape)
    kind[:, ::2] = 4
    kind[:, 0], kind[:, 2] = 0, 1
    anywhere = black_box.draw_places(lower_ends, upper_ends)
    witness = np.choose(kind, [lower_ends, upper_ends - 1, lower_ends, upper_ends - 1, anywhere])
    witness = np.where(np.arange(shape[2]) <= axis[:, None, None], point[box, None], witness)

    def ask(pair_rows: Array, witness_rows: Array, value: Array) -> Array:
        places = witness[pair_rows, witness_rows]
        places[np.arange(len(pair_rows)), axis[pair_rows]] = value
        return black_box(places)

    middle = point[box, axis]
    base = ask(*_cross_witnesses(np.arange(len(box))), np.repeat(middle, WITNESSES)).reshape(-1, WITNESSES)
    # Both ends of all (box, axis) pairs in one array: end e of pair i is row e * pairs + i.
    pair = np.tile(np.arange(len(box)), 2)
    end = np.concatenate([first[box, axis], last[box, axis]])
    rows = np.nonzero(end != middle[pair])[0]
    while len(rows):
        answers = ask(*_cross_witnesses(pair[rows]), np.repeat(end[rows], WITNESSES)).reshape(-1, WITNESSES)
        differs = answers != base[pair[rows]]
        moved = differs.any(axis=1)
        rows = rows[moved]
        witness_rows = differs[moved].argmax(axis=1)
        pair_rows = pair[rows]

        def agrees(
            subset: Array, mid: Array, pair_rows: Array = pair_rows, witness_rows: Array = witness_rows
        ) -> Array:
            pairs, witnesses = pair_rows[subset], witness_rows[subset]
            return np.asarray(ask(pairs, witnesses, mid) == base[pairs, witnesses])

        end[rows] = flip(middle[pair_rows], end[rows], agrees)[0]
        rows = rows[end[rows] != middle[pair_rows]]
    first[box, axis], last[box, axis] = np.split(end, 2)
    return first, last + 1


def _cross_witnesses(rows: Array) -> tuple[Array, Array]:
    """Indices that pair each row with each witness."""
    return np.repeat(rows, WITNESSES), np.tile(np.arange(WITNESSES), len(rows))


def flip(inside: Array, outside: Array, agrees: Callable[[Array, Array], Array]) -> tuple[Array, Array]:
    """Bisect all rows together, between a place where `agrees(rows, places)` is true and a place where it is false.

    The last place of each row where it is true comes back, and the neighbouring place where it is false.
    """
    inside, outside = inside.copy(), outside.copy()
    while len(rows := np.nonzero(np.abs(inside - outside) > 1)[0]):
        mid = (inside[rows] + outside[rows]) // 2
        agreement = agrees(rows, mid)
        inside[rows] = np.where(agreement, mid, inside[rows])
        outside[rows] = np.where(agreement, outside[rows], mid)
    return inside, outside


def prove_cells(
    black_box: BlackBox, low: Array, high: Array, point: Array, labels: Array, corners: int
) -> tuple[Array, Array, Array]:
    """Cells cut until all their probes agree with `labels`, and how often each cell was cut; each keeps its point.

    A probe that differs is walked to the point one coin at a time, the last axis first. The axis on which the outcome
    changes is bisected, and the cell ends there.
    """
    low, high, coins = low.copy(), high.copy(), low.shape[1]
    cuts = np.zeros(len(low), dtype=np.int64)
    open_cells = np.arange(len(low))
    while len(open_cells):
        places = probes(black_box, low[open_cells], high[open_cells], corners)
        answers = black_box(places.reshape(-1, coins)).reshape(len(places), -1)
        differs = answers != labels[open_cells]
        bad = differs.any(axis=0)
        probe_numbers = differs.argmax(axis=0)[bad]
        probe, answer = places[probe_numbers, bad], answers[probe_numbers, bad]
        open_cells = open_cells[bad]
        if not len(open_cells):
            break
        cuts[open_cells] += 1
        # [coins + 1, boxes, coins]: step j has the point's coins before axis j and the probe's from axis j on.
        from_point = np.arange(coins) < np.arange(coins + 1)[:, None]
        steps = np.where(from_point[:, None], point[open_cells], probe)
        walk_answers = black_box(steps.reshape(-1, coins)).reshape(coins + 1, -1)
        # Both ends of the walk were asked before: another answer now makes a stray.
        for end, earlier in ((0, answer), (coins, labels[open_cells])):
            for cell in np.nonzero(walk_answers[end] != earlier)[0]:
                black_box.note_stray(steps[end, cell], int(earlier[cell]), int(walk_answers[end, cell]))
        agreement = walk_answers == labels[open_cells]
        walks = agreement[1:] & ~agreement[:-1]
        axis = coins - 1 - walks[::-1].argmax(axis=0)
        real = np.nonzero(walks.any(axis=0) & (cuts[open_cells] <= ROUNDS))[0]
        tapes = steps[axis[real], real]
        axes = axis[real]

        def agrees(
            rows: Array, mid: Array, tapes: Array = tapes, axes: Array = axes, want: Array = labels[open_cells[real]]
        ) -> Array:
            places = tapes[rows].copy()
            places[np.arange(len(rows)), axes[rows]] = mid
            return np.asarray(black_box(places) == want[rows])

        inside, outside = flip(point[open_cells[real], axes], probe[real, axes], agrees)
        upper = outside > inside
        high[open_cells[real[upper]], axes[upper]] = outside[upper]
        low[open_cells[real[~upper]], axes[~upper]] = outside[~upper] + 1
        _halve(low, high, point, open_cells[cuts[open_cells] > ROUNDS])
        open_cells = open_cells[walks.any(axis=0) | (cuts[open_cells] > ROUNDS)]
    return low, high, cuts


def _halve(low: Array, high: Array, point: Array, rows: Array) -> None:
    """Halve each cell along its widest axis, and keep the half that holds its point."""
    axis = (high[rows] - low[rows]).argmax(axis=1)
    middle = (low[rows, axis] + high[rows, axis]) // 2
    upper = point[rows, axis] >= middle
    low[rows[upper], axis[upper]] = middle[upper]
    high[rows[~upper], axis[~upper]] = middle[~upper]
