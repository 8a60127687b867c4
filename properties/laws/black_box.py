"""A black box that is asked with tapes of coins on a grid.

It returns labels of the outcomes, and notices strays: requests whose outcome depends on other requests of the batch.
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
