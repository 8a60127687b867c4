"""Router: the scores by which a layer with experts chooses, for rows of one forward.

The choice jumps where two scores are equal. A `Router` says what it chooses, how far its scores lie from another
choice, and what another choice would be.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations

import numpy as np

from specverify.reference.trace import Array

UNKNOWN = -1
"""The number in place of an expert where a choice is not known, and in layers without experts."""

FILLINGS = 64
"""Most sets of groups that are tried to explain a choice of experts among groups."""


def largest_indices(scores: Array, count: int) -> Array:
    """The indices of the `count` largest scores of each row, the largest first, of equal ones the first: [T, count]."""
    order: Array = np.argsort(-scores, axis=-1, kind="stable")
    return order[:, :count]


@dataclass(frozen=True)
class Router:
    """The scores of the experts of a layer for T rows.

    Attributes:
        scores: The scores by which experts are chosen, [T, experts].
        weights: The weight that each expert would have, before chosen weights are scaled together, [T, experts].
        experts_per_row: Number of experts that a row goes through.
        groups: Number of groups of experts, side by side.
        open_groups: Number of groups among which a row chooses.
        best: Number of best experts of a group whose sum is the score of the group.
        unit: The unit of margins and gaps, by default the rms of these rows.
    """

    scores: Array
    weights: Array
    experts_per_row: int
    groups: int = 1
    open_groups: int = 1
    best: int = 1
    unit: float | None = None

    def converted(self, convert: Callable[[Array], Array]) -> "Router":
        """The router with `convert` of its scores and weights."""
        return replace(self, scores=convert(self.scores), weights=convert(self.weights))

    def of_rows(self, rows: list[int]) -> "Router":
        """The router of `rows` alone, in the unit of all rows."""
        return replace(self, scores=self.scores[rows], weights=self.weights[rows], unit=self.size)

    @cached_property
    def size(self) -> float:
        """The unit of margins and gaps: rms of all scores, or `unit`."""
        if self.unit is not None:
            return self.unit
        return max(float(np.sqrt(np.mean(np.square(self.scores)))), 1e-300)

    @cached_property
    def group_scores(self) -> Array:
        """The score of each group, [T, groups]."""
        sorted_scores: Array = -np.sort(-self.scores.reshape(len(self.scores), self.groups, -1), axis=-1)
        sums: Array = sorted_scores[..., : self.best].sum(axis=-1)
        return sums

    @cached_property
    def open_scores(self) -> Array:
        """The scores, minus infinity outside the open groups of each row: [T, experts]."""
        if self.groups == 1:
            return self.scores
        is_closed = np.ones((len(self.scores), self.groups), dtype=bool)
        np.put_along_axis(is_closed, largest_indices(self.group_scores, self.open_groups), False, axis=-1)
        return np.where(np.repeat(is_closed, self.scores.shape[1] // self.groups, axis=1), -np.inf, self.scores)

    @property
    def chosen(self) -> Array:
        """The experts of each row by these scores, [T, taken]."""
        return largest_indices(self.open_scores, self.experts_per_row)

    def follow(self, experts: Array | None) -> Array:
        """`experts` [T, taken] of each row, and the router's own in rows that are UNKNOWN there."""
        if experts is None:
            return self.chosen
        return np.where((experts == UNKNOWN).any(axis=-1, keepdims=True), self.chosen, experts)

    def margins(self) -> Array:
        """How far apart the scores lie between which the choice of each row falls, over `size`: [T]."""
        borders = [(self.open_scores, self.experts_per_row)]
        if self.groups > 1:
            borders.append((self.group_scores, self.open_groups))
        least = np.full(len(self.scores), np.inf)
        for row, count in borders:
            if count < row.shape[1]:
                sorted_scores = -np.sort(-row, axis=-1)
                least = np.minimum(least, sorted_scores[:, count - 1] - sorted_scores[:, count])
        return least / self.size

    def gaps(self, experts: Array) -> Array:
        """How much the scores of each row must change, over `size`, before `experts` [T, taken] is its choice: [T].

        0 where it is the router's own choice, whatever its order, or UNKNOWN; infinity for no choice at all, such as
        an expert twice.
        """
        is_choice = (np.sort(experts, axis=-1) == np.sort(self.chosen, axis=-1)).all(axis=-1)
        is_other = ~is_choice & (experts != UNKNOWN).all(axis=-1)
        gaps = np.zeros(len(experts))
        for row in np.flatnonzero(is_other):
            gaps[row] = self._gap(int(row), experts[row])
        return gaps / self.size

    def _gap(self, row: int, experts: Array) -> float:
        scores, width = self.scores[row], self.scores.shape[1] // self.groups
        if len(set(experts.tolist())) < self.experts_per_row or experts.min() < 0 or experts.max() >= len(scores):
            return float("inf")
        gaps = []
        for groups in self._openings(row, set((experts // width).tolist())):
            is_open = np.zeros(self.groups, dtype=bool)
            is_open[list(groups)] = True
            is_untaken = np.repeat(is_open, width)
            is_untaken[experts] = False
            gap = max(0.0, float(scores[is_untaken].max() - scores[experts].min())) if is_untaken.any() else 0.0
            if not is_open.all():
                group_scores = self.group_scores[row]
                gap = max(gap, float(group_scores[~is_open].max() - group_scores[is_open].min()))
            gaps.append(gap)
        return min(gaps, default=float("inf"))

    def _openings(self, row: int, needed_groups: set[int]) -> Iterator[tuple[int, ...]]:
        """Sets of open groups that hold `needed_groups`, those with the best scores first; none where too many."""
        num_free = self.open_groups - len(needed_groups)
        if num_free < 0:
            return
        other_groups = [
            int(group)
            for group in np.argsort(-self.group_scores[row], kind="stable")
            if int(group) not in needed_groups
        ]
        for number, filling in enumerate(combinations(other_groups, num_free)):
            if number == FILLINGS:
                return
            yield (*sorted(needed_groups), *filling)

    def squared_change(self, changed: "Router") -> Array:
        """The mean square by which the scores of `changed`, those of the same rows, lie off these, over `size`: [T]."""
        squared: Array = np.mean(np.square((changed.scores - self.scores) / self.size), axis=-1)
        return squared

    def exchanges(self, row: int, limit: float) -> list[tuple[float, Array]]:
        """Other choices of `row` by one exchange across a border at most `limit` wide: (width over `size`, experts).

        An expert gives way to another, or an open group to another; the narrowest first.
        """
        exchanges: list[tuple[float, Array]] = []
        scores, chosen = self.open_scores[row], self.chosen[row]
        for expert in chosen:
            for candidate in np.flatnonzero(scores >= scores[expert] - limit * self.size):
                if candidate not in chosen:
                    width = float(scores[expert] - scores[candidate]) / self.size
                    exchanges.append((width, np.where(chosen == expert, candidate, chosen)))
        if self.groups > 1:
            exchanges += self._group_exchanges(row, limit)
        return sorted(exchanges, key=lambda pair: pair[0])

    def _group_exchanges(self, row: int, limit: float) -> Iterator[tuple[float, Array]]:
        group_scores, width = self.group_scores[row], self.scores.shape[1] // self.groups
        open_groups = largest_indices(group_scores[None], self.open_groups)[0]
        for group in open_groups:
            for candidate in np.flatnonzero(group_scores >= group_scores[group] - limit * self.size):
                if candidate in open_groups:
                    continue
                is_closed = ~np.isin(np.arange(self.groups), np.where(open_groups == group, candidate, open_groups))
                scores = np.where(np.repeat(is_closed, width), -np.inf, self.scores[row])
                yield (
                    float(group_scores[group] - group_scores[candidate]) / self.size,
                    largest_indices(scores[None], self.experts_per_row)[0],
                )
