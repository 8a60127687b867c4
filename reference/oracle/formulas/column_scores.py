"""ColumnScores: the scores by which an indexer chooses columns, for rows of one forward.

The choice jumps where two scores are equal. Rectified products make many scores 0, of which a row takes the first
columns. Rounding can bring such a column before another one by making a product positive, and the distance to that is
what the product lacks. So each pair of columns has a distance: how much a score or a product of the row must change,
over their rms, before the two change places. A `ColumnScores` says what it chooses, how far its scores lie from
another choice, and what another choice would be.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from specverify.reference.oracle.formulas.routers import UNKNOWN
from specverify.reference.trace import Array


@dataclass(frozen=True)
class ColumnScores:
    """The scores of the columns of a layer for T rows.

    Attributes:
        scores: By row and position in the row's own text, [T, longest]; minus infinity behind the row's own position.
        products: The largest of the heads' products with each column, before they are rectified, [T, longest]; a column
            scores 0 where it is not positive.
        product_sizes: Rms of the products of all heads with the columns of a row, [T].
        columns_per_row: The most columns that a row attends to.
    """

    scores: Array
    products: Array
    product_sizes: Array
    columns_per_row: int

    @cached_property
    def lengths(self) -> Array:
        """The number of columns that each row sees, [T]."""
        lengths: Array = np.isfinite(self.scores).sum(axis=-1)
        return lengths

    @cached_property
    def sizes(self) -> Array:
        """Rms of the scores that each row sees: the unit of its margins and gaps, [T]; 1 where all scores are 0."""
        seen = np.where(np.isfinite(self.scores), self.scores, 0.0)
        sizes = np.sqrt(np.square(seen).sum(axis=-1) / self.lengths)
        return np.where(sizes > 0, sizes, 1.0)

    @property
    def chosen(self) -> Array:
        """The columns of each row by these scores, ascending, UNKNOWN behind them: [T, at most columns_per_row]."""
        longest = self.scores.shape[1]
        best = np.argsort(-self.scores, axis=-1, kind="stable")[:, : self.columns_per_row]
        # Columns behind the row's own position have no score and come last.
        is_seen = np.arange(best.shape[1]) < self.lengths[:, None]
        chosen = np.sort(np.where(is_seen, best, longest), axis=-1)
        return np.where(chosen < longest, chosen, UNKNOWN)

    def follow(self, columns: Array | None) -> Array:
        """`columns` [T, k] of each row, and the own ones of these scores in rows that are UNKNOWN there."""
        return followed_columns(self.chosen, columns)

    def _order(self, row: int) -> Array:
        """The columns of `row` from the best to the worst; of equal ones the first comes first."""
        order: Array = np.argsort(-self.scores[row], kind="stable")
        return order[: int(np.isfinite(self.scores[row]).sum())]

    def _distances(self, row: int, first: Array, second: Array) -> Array:
        """How much must change before columns `second` come before `first`, [first, second]; 0 where they do."""
        scores, lacking = self.scores[row], np.maximum(-self.products[row] / self.product_sizes[row], 0.0)
        apart = (scores[first][:, None] - scores[second]) / self.sizes[row]
        # Equal scores that are not 0 have no order to lose.
        between_zeros = np.minimum(lacking[first][:, None], lacking[second])
        is_tied = apart == 0
        comes_before = (apart > 0) | (is_tied & (first[:, None] < second))
        distances: Array = np.where(comes_before, np.where(is_tied, between_zeros, apart), 0.0)
        return distances

    def margins(self) -> Array:
        """The least distance of a column that a row takes to one that it leaves, [T]; infinity where none is left."""
        rows = range(len(self.scores))
        return np.array([self._distances(row, *self._sides(row)).min(initial=np.inf) for row in rows])

    def _sides(self, row: int) -> tuple[Array, Array]:
        """The columns that `row` takes by its scores, and those that it leaves."""
        order = self._order(row)
        return order[: self.columns_per_row], order[self.columns_per_row :]

    def gaps(self, columns: Array) -> Array:
        """The distance by which each row must change before `columns` [T, k] is its choice: [T].

        0 where it is the row's own choice, or UNKNOWN; infinity for no choice at all: too few columns or too many, one
        twice, or one that the row does not see.
        """
        return np.array([self._gap(row, columns[row][columns[row] != UNKNOWN]) for row in range(len(self.scores))])

    def _gap(self, row: int, columns: Array) -> float:
        length = int(self.lengths[row])
        if not len(columns):
            return 0.0
        is_choice = len(np.unique(columns)) == len(columns) == min(self.columns_per_row, length)
        if not is_choice or columns.min() < 0 or columns.max() >= length:
            return float("inf")
        left = np.setdiff1d(np.arange(length), columns)
        return float(self._distances(row, left, columns).max(initial=0.0))

    def exchanges(self, row: int, limit: float) -> list[tuple[float, Array]]:
        """Other choices of `row` by one column for another at most `limit` away: (distance, columns), nearest first."""
        taken, left = self._sides(row)
        distances = self._distances(row, taken, left)
        exchanges = []
        for place, other in np.argwhere(distances <= limit):
            columns = np.sort(np.where(taken == taken[place], left[other], taken))
            exchanges.append((float(distances[place, other]), columns))
        return sorted(exchanges, key=lambda pair: pair[0])

    def squared_change(self, changed: "ColumnScores") -> Array:
        """How far the scores of `changed`, those of the same rows, lie from these, over their rms and squared: [T].

        The mean over columns whose scores move at all, or over the products behind them, whichever is larger.
        """
        seen = np.isfinite(self.scores)
        scores = np.where(seen, changed.scores, 0.0) - np.where(seen, self.scores, 0.0)
        moving = np.maximum((scores != 0).sum(axis=-1), 1)
        of_scores = np.square(scores).sum(axis=-1) / moving / np.square(self.sizes)
        products = np.where(seen, changed.products - self.products, 0.0)
        of_products = np.square(products).sum(axis=-1) / self.lengths / np.square(self.product_sizes)
        squared: Array = np.maximum(of_scores, of_products)
        return squared


@dataclass(frozen=True)
class FollowedColumns:
    """The columns of a layer without an indexer, whose rows take those of the layer before: no scores choose here.

    Attributes:
        chosen: The columns of the layer before, [T, k].
    """

    chosen: Array

    def follow(self, columns: Array | None) -> Array:
        """See `ColumnScores.follow`."""
        return followed_columns(self.chosen, columns)

    def margins(self) -> Array:
        """Infinity: nothing lies near."""
        return np.full(len(self.chosen), np.inf)

    def gaps(self, columns: Array) -> Array:
        """0 where the columns are those of the layer before or UNKNOWN, else infinity, [T]."""
        gaps = []
        for own, other in zip(self.chosen, columns, strict=True):
            known = other[other != UNKNOWN]
            is_own = not len(known) or np.array_equal(np.sort(known), own[own != UNKNOWN])
            gaps.append(0.0 if is_own else np.inf)
        return np.array(gaps)

    def exchanges(self, row: int, limit: float) -> list[tuple[float, Array]]:
        """None: another choice is one of the layer before."""
        return []

    def squared_change(self, changed: object) -> Array:
        """Zeros, [T]."""
        return np.zeros(len(self.chosen))


def followed_columns(own: Array, known: Array | None) -> Array:
    """The columns `known` [T, k] of each row, and `own` [T, k'] in rows that are UNKNOWN there."""
    if known is None:
        return own
    widest = max(own.shape[1], known.shape[1])
    followed = np.full((len(own), widest), UNKNOWN)
    for row, columns in enumerate(known):
        source = columns if (columns != UNKNOWN).any() else own[row]
        followed[row, : len(source)] = source
    return followed
