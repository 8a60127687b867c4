"""Router: the scores by which a layer with experts chooses, for rows of one forward.

The choice jumps where two scores are equal. A `Router` says what it chooses, how far its scores lie from another
choice, and what another choice would be.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from reference.trace import Array

UNKNOWN = -1
"""The number in place of an expert where a choice is not known, and in layers without experts."""

FILLINGS = 64
"""Most sets of groups that are tried to explain a choice of experts among groups."""


def largest(scores: Array, count: int) -> Array:
    """The indices of the `count` largest scores of each row, the largest first, of equal ones the first: [T, count]."""
    order: Array = np.argsort(-scores, axis=-1, kind="stable")
    return order[:, :count]


@dataclass(frozen=True)
class Router:
    """The scores of the experts of a layer for T rows.

    Attributes:
        scores: The scores by which experts are chosen, [T, experts].
        weights: The weight that each expert would have, before chosen weights are scaled together, [T, experts].
        taken: Number of experts that a row goes through.
        groups: Number of groups of experts, side by side.
        open_groups: Number of groups among which a row chooses.
        best: Number of best experts of a group whose sum is the score of the group.
    """

    scores: Array
    weights: Array
    taken: int
    groups: int = 1
    open_groups: int = 1
    best: int = 1

    @property
    def size(self) -> float:
        """Rms of all scores: the unit of margins and gaps."""
        return max(float(np.sqrt(np.mean(np.square(self.scores)))), 1e-300)

    @property
    def of_groups(self) -> Array:
        """The score of each group, [T, groups]."""
        ranked: Array = -np.sort(-self.scores.reshape(len(self.scores), self.groups, -1), axis=-1)
        summed: Array = ranked[..., : self.best].sum(axis=-1)
        return summed

    @property
    def open_scores(self) -> Array:
        """The scores, minus infinity outside the open groups of each row: [T, experts]."""
        if self.groups == 1:
            return self.scores
        shut = np.ones((len(self.scores), self.groups), dtype=bool)
        np.put_along_axis(shut, largest(self.of_groups, self.open_groups), False, axis=-1)
        return np.where(np.repeat(shut, self.scores.shape[1] // self.groups, axis=1), -np.inf, self.scores)

    @property
    def chosen(self) -> Array:
        """The experts of each row by these scores, [T, taken]."""
        return largest(self.open_scores, self.taken)

    def followed(self, others: Array | None) -> Array:
        """The experts `others` [T, taken] of each row, and the router's own in rows that are UNKNOWN there."""
        if others is None:
            return self.chosen
        return np.where((others == UNKNOWN).any(axis=-1, keepdims=True), self.chosen, others)

    def margins(self) -> Array:
        """How far apart the scores lie between which the choice of each row falls, over `size`: [T]."""
        borders = [(self.open_scores, self.taken)]
        if self.groups > 1:
            borders.append((self.of_groups, self.open_groups))
        least = np.full(len(self.scores), np.inf)
        for row, count in borders:
            if count < row.shape[1]:
                ranked = -np.sort(-row, axis=-1)
                least = np.minimum(least, ranked[:, count - 1] - ranked[:, count])
        return least / self.size

    def gaps(self, others: Array) -> Array:
        """How much the scores of each row must change, over `size`, before `others` [T, taken] is its choice: [T].

        0 where it is the router's own choice, whatever its order, or UNKNOWN; infinity for no choice at all, such as
        an expert twice.
        """
        same = (np.sort(others, axis=-1) == np.sort(self.chosen, axis=-1)).all(axis=-1)
        unlike = ~same & (others != UNKNOWN).all(axis=-1)
        found = np.zeros(len(others))
        for row in np.flatnonzero(unlike):
            found[row] = self._gap(int(row), others[row])
        return found / self.size

    def _gap(self, row: int, experts: Array) -> float:
        scores, width = self.scores[row], self.scores.shape[1] // self.groups
        if len(set(experts.tolist())) < self.taken or experts.min() < 0 or experts.max() >= len(scores):
            return float("inf")
        gaps = []
        for groups in self._openings(row, set((experts // width).tolist())):
            inside = np.zeros(self.groups, dtype=bool)
            inside[list(groups)] = True
            rest = np.repeat(inside, width)
            rest[experts] = False
            gap = max(0.0, float(scores[rest].max() - scores[experts].min())) if rest.any() else 0.0
            if not inside.all():
                grouped = self.of_groups[row]
                gap = max(gap, float(grouped[~inside].max() - grouped[inside].min()))
            gaps.append(gap)
        return min(gaps, default=float("inf"))

    def _openings(self, row: int, needed: set[int]) -> Iterator[tuple[int, ...]]:
        """Sets of open groups that hold the groups `needed`, those with the best scores first; none where too many."""
        free = self.open_groups - len(needed)
        if free < 0:
            return
        others = [int(group) for group in np.argsort(-self.of_groups[row], kind="stable") if int(group) not in needed]
        for number, filling in enumerate(combinations(others, free)):
            if number == FILLINGS:
                return
            yield (*sorted(needed), *filling)

    def exchanges(self, row: int, limit: float) -> list[tuple[float, Array]]:
        """Other choices of `row` by one exchange across a border at most `limit` wide: (width over `size`, experts).

        An expert gives way to another, or an open group to another; the narrowest first.
        """
        found: list[tuple[float, Array]] = []
        scores, own = self.open_scores[row], self.chosen[row]
        for expert in own:
            for other in np.flatnonzero(scores >= scores[expert] - limit * self.size):
                if other not in own:
                    width = float(scores[expert] - scores[other]) / self.size
                    found.append((width, np.where(own == expert, other, own)))
        if self.groups > 1:
            found += self._of_other_groups(row, limit)
        return sorted(found, key=lambda pair: pair[0])

    def _of_other_groups(self, row: int, limit: float) -> Iterator[tuple[float, Array]]:
        grouped, width = self.of_groups[row], self.scores.shape[1] // self.groups
        inside = largest(grouped[None], self.open_groups)[0]
        for group in inside:
            for other in np.flatnonzero(grouped >= grouped[group] - limit * self.size):
                if other in inside:
                    continue
                shut = ~np.isin(np.arange(self.groups), np.where(inside == group, other, inside))
                scores = np.where(np.repeat(shut, width), -np.inf, self.scores[row])
                yield float(grouped[group] - grouped[other]) / self.size, largest(scores[None], self.taken)[0]
