"""Enumeration: the exact law of a black box that takes a tape of coins.

The cube of tapes is cut into cells with one outcome each.
"""

import math
from dataclasses import dataclass

import numpy as np

from specverify.properties.laws.black_box import (
    BlackBox,
    Evaluate,
    Signature,
    Stray,
    bisect_intervals,
    probes,
    prove_cells,
)
from specverify.reference.tape import place
from specverify.reference.trace import Array
from specverify.reference.tree import Shape

__all__ = ["MOST_CELLS", "Law", "MassLost", "Stray", "TooManyCells", "decisions", "law"]

MOST_CELLS = 1_000_000
"""Number of cells at which an enumeration gives up."""

AUDIT = 1 << 15
"""Tapes on which a law from searched cells is checked again; a wrong mass of 0.001 escapes with probability 1e-14."""

EACH = 128
"""Tapes on which each searched cell is checked as well, however small it is; some of their coins lie at its ends."""

TOTAL = 1e-12
"""Largest distance from 1 of the sum of all masses."""


class TooManyCells(Exception):
    """The black box has more cells than were allowed."""


class MassLost(ArithmeticError):
    """The masses of a law do not sum to 1: its cells overlap or leave a gap."""


@dataclass(frozen=True)
class Law:
    """The law of a black box whose coins are uniform on the grid.

    Attributes:
        outcomes: The mass of each block of tokens that was ever seen, however small; empty where there are strays,
            since a request whose outcome depends on its neighbours has no law of its own.
        paths: The same, by accepted rows and tokens.
        cells: Number of boxes of tapes, each with one outcome, that fill the cube.
        searched: Number of cells that were found by search; the backend reported the others.
        evaluations: Number of requests run.
        calls: Number of batches in which they were run.
        disputed: Number of reported cells in which a probe found another outcome; they were searched instead.
        cut: Number of searched cells that a probe made smaller.
        strays: Tapes whose outcome changed beside other requests, the first 16.
    """

    outcomes: dict[tuple[int, ...], float]
    paths: dict[Signature, float]
    cells: int
    searched: int
    evaluations: int
    calls: int
    disputed: int
    cut: int
    strays: tuple[Stray, ...]


def decisions(shape: Shape) -> tuple[int, ...]:
    """The coins of one step over `shape`, in the order in which a lazy decoder needs them: an `order` for `law`.

    Cells found by search follow this order; a good order gives no more cells than there are paths of decision.
    """
    nodes = sorted(range(len(shape)), key=lambda node: (shape.depth[node], node))
    lazy = [place(kind, node, len(shape)) for node in nodes for kind in ("draft", "order", "accept")]
    return (*lazy, place("bonus", 0, len(shape)))


def law(
    evaluate: Evaluate,
    coins: int,
    *,
    grid: int = 2**53,
    seed: int = 0,
    probes: int = 2,
    most_cells: int = MOST_CELLS,
    order: tuple[int, ...] | None = None,
) -> Law:
    """The exact law of `evaluate` under independent coins k / grid, k uniform in 0..grid-1.

    Open boxes are taken in waves: one tape inside each is run, the cell around it is taken as reported or found by
    bisection, probed at random corners and inside, and cut out of its box. The one premise is that decisions compare a
    coin with a number that earlier decisions fix; the probes try to refute it. A searched cell may still hide a
    decision that its outcome does not show, so all searched cells are audited together (AUDIT, EACH). The error that
    passes is small: with eight tokens and drafts inside, a total variation of 1e-6 was seen.

    Args:
        evaluate: The black box; it may report cells (`Blocks.low`, `high`), which saves the search.
        coins: Length of a tape.
        grid: 2^53 for float64, 2^24 for float32: the coins that their generators return.
        seed: Seed of the tapes that are tried; laws of different seeds agree.
        probes: Number of corners probed in each cell, beside one place inside.
        most_cells: Number of cells at which to give up.
        order: Coins in the order of decision, as far as known; by default the order of the tape.

    Raises:
        TooManyCells: There are more than `most_cells`.
        MassLost: The masses do not sum to 1 within 1e-12.
    """
    black_box = BlackBox(evaluate, coins, grid, tuple(range(coins)) if order is None else order, seed)
    cube = (np.zeros((1, coins), dtype=np.int64), np.full((1, coins), grid, dtype=np.int64))
    start = probe_cube(black_box, *cube)
    labels = black_box(start)
    black_box.ask_alone(start, labels)
    black_box.ask_mixed(start, labels, start[:0])
    work = _Enumeration(black_box, probes, most_cells)
    work.push(*cube, np.zeros(1, dtype=np.int64))
    while not black_box.strays and work.open:
        work.wave()
        if not work.open and not black_box.strays:
            work.close()
    if black_box.strays:
        return Law(
            {}, {}, 0, 0, black_box.evaluations, black_box.calls, work.disputed, work.cut, tuple(black_box.strays)
        )
    paths = work.masses()
    outcomes: dict[tuple[int, ...], float] = {}
    for (_, tokens), mass in sorted(paths.items()):
        outcomes[tokens] = outcomes.get(tokens, 0.0) + mass
    total = math.fsum(paths.values())
    if abs(total - 1.0) > TOTAL:
        raise MassLost(f"the masses of {work.cells} cells sum to 1{total - 1.0:+.3g}")
    run = (black_box.evaluations, black_box.calls)
    return Law(outcomes, paths, work.cells, work.searched, *run, work.disputed, work.cut, ())


def probe_cube(black_box: BlackBox, low: Array, high: Array) -> Array:
    """The first places to ask: corners of the cube, and 64 inside."""
    inside = black_box.draw_places(*(np.repeat(side, 64, axis=0) for side in (low, high)))
    return np.concatenate([probes(black_box, low, high, 8)[:, 0], inside])


class _Enumeration:
    """The boxes still open, and the cells found."""

    def __init__(self, black_box: BlackBox, corners: int, most_cells: int) -> None:
        self.black_box = black_box
        self.corners = corners
        self.most_cells = most_cells
        self.open: list[tuple[Array, Array, Array]] = []
        self.disputed = 0
        self.cut = 0
        self.cells = 0
        self._cell_arrays: list[tuple[Array, Array, Array, Array]] = []
        # A search holds witnesses [axes, WITNESSES, coins] for each box, so its waves are smaller.
        self._wave = (1 << 19) // (black_box.coins + 7)
        self._search = max(1, (1 << 19) // black_box.coins**2)
        self._reports = True

    def push(self, low: Array, high: Array, settled: Array) -> None:
        """Open boxes int64 [boxes, coins]; of each, the first `settled` axes are narrow enough."""
        if len(low):
            self.open.append((low, high, settled))

    def wave(self) -> None:
        """Take the youngest open boxes, find a cell in each, and open the rest of the box."""
        low, high, settled = self._take(self._wave if self._reports else self._search)
        black_box = self.black_box
        point = black_box.draw_places(low, high)
        labels, first, beyond = black_box.cells(point)
        has_cell: Array = np.zeros(len(low), dtype=bool)
        self._reports = first is not None and beyond is not None
        if first is not None and beyond is not None:
            first, beyond = np.maximum(first, low), np.minimum(beyond, high)
            has_cell[:] = ((first <= point) & (point < beyond)).all(axis=1)
            chosen = np.nonzero(has_cell)[0]
            places = probes(black_box, first[chosen], beyond[chosen], self.corners)
            # One call for both: a call to an engine in a process of its own costs more than a request in the batch.
            answers = black_box.ask_mixed(point, labels, places.reshape(-1, black_box.coins))
            agree = (answers.reshape(len(places), -1) == labels[chosen]).all(axis=0)
            has_cell[chosen[~agree]] = False
            self.disputed += int((~has_cell).sum())
            self._keep_cells(low[has_cell], high[has_cell], first[has_cell], beyond[has_cell], labels[has_cell], None)
        else:
            black_box.ask_mixed(point, labels, point[:0])
        chosen = ~has_cell
        self._search_in(low[chosen], high[chosen], point[chosen], labels[chosen], settled[chosen])
        num_open = sum(len(part[0]) for part in self.open)
        # Each open box holds at least one cell, so a law that cannot be finished is given up early.
        if self.cells + num_open > self.most_cells:
            raise TooManyCells(f"more than {self.most_cells} cells: {self.cells} found, {num_open} boxes still open")

    def close(self) -> None:
        """Audit the searched cells, and open those again that do not hold.

        A cell is searched again around the place that refutes it, also where the place's outcome has no cell at all.
        """
        low, high, labels, searched = self._all()
        black_box = self.black_box
        mass = np.prod((high - low) / black_box.grid, axis=1) * searched
        cell = np.zeros(0, dtype=np.int64)
        if searched.any():
            by_mass = black_box.rng.choice(len(low), AUDIT, p=mass / mass.sum())
            cell = np.concatenate([by_mass, np.repeat(np.nonzero(searched)[0], EACH)])
        place = black_box.draw_places(low[cell], high[cell])
        # The tapes after the first AUDIT ones take about half of their coins from the ends of the cell.
        kind = black_box.rng.integers(4, size=place.shape)
        kind[:AUDIT] = 3
        place = np.where(kind == 0, low[cell], np.where(kind == 1, high[cell] - 1, place))
        answers = black_box(place) if len(cell) else cell
        wrong = np.nonzero(answers != labels[cell])[0]
        place, answers, cell = place[wrong], answers[wrong], cell[wrong]
        # An outcome that was seen and has no cell: its place lies in a cell that claims another outcome.
        for label in set(black_box.first) - {int(label) for label in np.unique(labels)}:
            point = black_box.first[label]
            cells_around = np.nonzero(((low <= point) & (point < high)).all(axis=1))[0]
            place = np.concatenate([place, point[None]])
            cell = np.concatenate([cell, cells_around])
            answers = np.append(answers, label)
        cell, first_index = np.unique(cell, return_index=True)
        is_kept = np.ones(len(low), dtype=bool)
        is_kept[cell] = False
        self._cell_arrays = [(low[is_kept], high[is_kept], labels[is_kept], searched[is_kept])]
        self.cells -= len(cell)
        self.cut += len(cell)
        settled = np.zeros(len(cell), dtype=np.int64)
        self._search_in(low[cell], high[cell], place[first_index], answers[first_index], settled)

    def masses(self) -> dict[Signature, float]:
        """The mass of every signature, rounded once."""
        low, high, labels, _ = self._all()
        # A mass too small for float64 becomes the smallest one, so that an outcome that was seen has a mass.
        mass = np.maximum(np.prod((high - low) / self.black_box.grid, axis=1), np.finfo(np.float64).tiny)
        order = np.argsort(labels, kind="stable")
        names, starts = np.unique(labels[order], return_index=True)
        parts = np.split(mass[order], starts[1:])
        signatures = self.black_box.signatures
        return {signatures[int(name)]: math.fsum(part) for name, part in zip(names, parts, strict=True)}

    def _search_in(self, low: Array, high: Array, point: Array, labels: Array, settled: Array) -> None:
        """Search the cell around a point of each box."""
        for start in range(0, len(low), self._search):
            part = slice(start, start + self._search)
            first, beyond = bisect_intervals(self.black_box, low[part], high[part], point[part], settled[part])
            first, beyond, cuts = prove_cells(
                self.black_box, first, beyond, point[part], labels[part], 4 * self.corners
            )
            self.cut += int((cuts > 0).sum())
            self._keep_cells(low[part], high[part], first, beyond, labels[part], settled[part])

    @property
    def searched(self) -> int:
        """Number of searched cells among the cells held."""
        return sum(int(part[3].sum()) for part in self._cell_arrays)

    def _all(self) -> tuple[Array, Array, Array, Array]:
        low, high, labels, searched = (np.concatenate(parts) for parts in zip(*self._cell_arrays, strict=True))
        return low, high, labels, searched

    def _take(self, limit: int) -> tuple[Array, Array, Array]:
        taken_boxes = []
        count = 0
        while self.open and count < limit:
            part = self.open.pop()
            if len(part[0]) > limit - count:
                self.open.append((part[0][limit - count :], part[1][limit - count :], part[2][limit - count :]))
                part = (part[0][: limit - count], part[1][: limit - count], part[2][: limit - count])
            taken_boxes.append(part)
            count += len(part[0])
        low, high, settled = (np.concatenate(parts) for parts in zip(*taken_boxes, strict=True))
        return low, high, settled

    def _keep_cells(
        self, low: Array, high: Array, first: Array, beyond: Array, labels: Array, settled: Array | None
    ) -> None:
        """Hold cells [first, beyond), and open the rest of their boxes, axis by axis.

        The rest along an axis keeps the cell's intervals on earlier axes; if those were searched, they are settled.
        """
        self._cell_arrays.append((first, beyond, labels, np.full(len(first), settled is not None)))
        self.cells += len(first)
        low, high = low.copy(), high.copy()
        for axis in range(low.shape[1]):
            for below in (True, False):
                boxes = np.nonzero(low[:, axis] < first[:, axis] if below else high[:, axis] > beyond[:, axis])[0]
                rest_low, rest_high = low[boxes], high[boxes]
                if below:
                    rest_high[:, axis] = first[boxes, axis]
                else:
                    rest_low[:, axis] = beyond[boxes, axis]
                self.push(rest_low, rest_high, np.full(len(boxes), 0 if settled is None else axis))
            low[:, axis], high[:, axis] = first[:, axis], beyond[:, axis]
