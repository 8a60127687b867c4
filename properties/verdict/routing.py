"""Rule T for choices that are not shown: a tied row may have taken either expert, or either column.

Where a backend shows the experts and columns of its rows, the oracle takes the same ones
(`specverify.properties.verdict.followed`), and no tie excuses anything. Where it does not, a difference is excused up
to the move that ties make: the oracle exchanges the experts or columns of each tied row that the difference reads, in
the layers that it reads, and looks how far its own row moves. An exchange changes the scores below it, and may leave
other ties there: these are exchanged behind it. Each row of a layer grants the largest move that its exchange makes,
alone or behind others, and these moves are added. A difference that goes further is a finding. An excused one is
counted as a routing tie, and never dropped: a verdict, a run and its page count routing ties of their own.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from specverify.properties.verdict.finding import Finding, Reads, RoutingTie
from specverify.properties.verdict.followed import Follows, can_follow, sigma, tie_limits, tie_units
from specverify.properties.verdict.invariant import Oracle
from specverify.reference.case import Case
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.choices import COLUMNS, KINDS, Choices, RowChoices, same_width
from specverify.reference.oracle.formulas.routers import UNKNOWN
from specverify.reference.oracle.scored_choices import ScoredChoices
from specverify.reference.trace import Array, Step

MOST_SITES = 32
"""Most ties of one difference whose choices are exchanged, the nearest first, and as many again behind exchanges.

Further ones grant nothing.
"""

MOST_EXCHANGES = 4
"""Most exchanges of one tied row in one layer."""

MOST_BEHIND = 16
"""Most exchanges of one difference behind which further ties are looked for, those of fewest and nearest ties first."""


class Place(NamedTuple):
    """A choice: its layer, its kind as a number in KINDS, and its row. A row makes its choices in that order."""

    layer: int
    kind: int
    row: int


Site = tuple[float, Place]
"""A tie: its gap in sigmas, and its place."""

ExchangePath = tuple[tuple[Place, tuple[int, ...]], ...]
"""Exchanges, each behind the one before it: a place, and the experts or columns that its row takes."""


@dataclass
class Exchanges:
    """The oracle of one case with tied choices exchanged; it remembers what it was asked.

    Attributes:
        oracle: The oracle, with the choices that the backend shows.
    """

    oracle: Oracle
    _scored_choices: dict[object, ScoredChoices | None] = field(default_factory=dict)
    _known_margins: dict[object, Array] = field(default_factory=dict)
    _tie_limits: dict[object, Array] = field(default_factory=dict)
    _exchanged_oracles: dict[object, Oracle] = field(default_factory=dict)

    def explain(self, finding: Finding) -> RoutingTie | None:
        """The nearest of the ties that explain `finding` together; None where they do not."""
        reads = finding.reads
        if reads is None or finding.measure is None or not can_follow(reads.case, self.oracle):
            return None
        needed = (finding.measure - 1) * reads.limit
        if not np.isfinite(needed):
            return None
        try:
            sites = self.sites(reads)
            moves: dict[Place, float] = {}
            for place, move in self._moves(reads) if sites else ():
                moves[place] = max(move, moves.get(place, 0.0))
                granted = sum(moves.values())
                if granted >= needed:
                    gap, (layer, number, row) = sites[0]
                    tie = RoutingTie(finding.invariant, finding.step, layer, row, gap, float(needed), granted)
                    return replace(tie, kind=KINDS[number])
        except Malformed:
            return None
        return None

    def sites(self, reads: Reads, path: ExchangePath = ()) -> list[Site]:
        """The ties in the rows and layers that `reads` names and whose choices it does not know, the nearest first.

        Where exchanges come before, the ties are those of the choices behind the last of them.
        """
        above = len(reads.context)
        nodes = range(len(reads.tree)) if reads.node is None else reads.tree.path(reads.node)
        rows = [*range(above), *(above + node for node in nodes)]
        # Of the columns chosen in the layer of an attention output, no row but its own reads those of another row.
        own_rows = rows if reads.node is None else rows[-1:]
        sites: list[Site] = []
        for number, kind in enumerate(KINDS):
            scored = self._scored(kind, reads, path)
            if scored is None:
                continue
            margins, limits = self._margins(kind, reads, path), self._limits(kind, reads, path)
            near = margins / sigma(reads.case.dtype, len(margins))
            is_shown = (self._shown_choices(kind, reads) != UNKNOWN).any(axis=-1)
            sites += [
                (float(near[layer, row]), Place(layer, number, row))
                for layer in range(_end(kind, reads, len(margins)))
                for row in (own_rows if layer == reads.before else rows)
                if (not path or (layer, number) > path[-1][0][:2])
                and not is_shown[layer, row]
                and margins[layer, row] <= limits[layer, row]
            ]
        return sorted(sites)

    def has_clear_row(self, step: Step, reads: Reads) -> bool:
        """Whether some node of `step` has no tie in its rows, in the layers that `reads` names."""
        if step.drafted is None:
            return False
        tree = step.drafted.tree
        node_reads = replace(reads, context=step.context, tree=tree)
        return any(not self.sites(replace(node_reads, node=node)) for node in range(len(tree)))

    def _moves(self, reads: Reads) -> Iterator[tuple[Place, float]]:
        """The rms change of the row by each exchange; those behind fewer exchanges come first."""
        scored_by_kind = {kind: self._scored(kind, reads) for kind in KINDS}
        last = max(
            (_end(kind, reads, len(scored.scorers)) - 1, number)
            for number, (kind, scored) in enumerate(scored_by_kind.items())
            if scored is not None
        )
        queue = deque[ExchangePath]([()])
        num_tried = 0
        sites_left = MOST_SITES
        while queue and num_tried <= MOST_BEHIND and sites_left:
            path = queue.popleft()
            num_tried += 1
            base = reads.row(self._oracle_after(reads, path))
            sites = [] if base is None else self.sites(reads, path)[:sites_left]
            sites_left -= len(sites) if path else 0
            for _, place in sites:
                for choice in self._other_choices(reads, path, place):
                    longer_path = (*path, (place, choice))
                    moved_row = reads.row(self._oracle_after(reads, longer_path))
                    if moved_row is not None and base is not None and moved_row.shape == base.shape:
                        yield place, float(np.sqrt(np.nanmean(np.square(moved_row - base))))
                    if place[:2] < last:
                        queue.append(longer_path)

    def _other_choices(self, reads: Reads, path: ExchangePath, place: Place) -> list[tuple[int, ...]]:
        """The choices that a tied row may take in place of its own."""
        kind = KINDS[place.kind]
        scored = self._scored(kind, reads, path)
        scorer = None if scored is None else scored.scorers[place.layer]
        limit = float(self._limits(kind, reads, path)[place.layer, place.row])
        exchanges = [] if scorer is None else scorer.exchanges(place.row, limit)[:MOST_EXCHANGES]
        return [tuple(choice.tolist()) for _, choice in exchanges]

    def _oracle_after(self, reads: Reads, path: ExchangePath) -> Oracle:
        """The oracle with other choices in some rows, the backend's where they are shown, its own elsewhere."""
        if not path:
            return self.oracle
        key = (*_question(reads), path)
        if key not in self._exchanged_oracles:
            assert isinstance(self.oracle, Follows)
            chosen = {kind: self._shown_choices(kind, reads) for kind in KINDS if self._scored(kind, reads) is not None}
            for (layer, number, row), choice in path:
                chosen[KINDS[number]][layer, row] = UNKNOWN
                chosen[KINDS[number]][layer, row, : len(choice)] = choice
            known = getattr(self.oracle, "choices", None)
            codes = known.of(reads.context, reads.tree).codes if isinstance(known, Choices) else None
            rows = RowChoices(**chosen, codes=codes)
            choices = Choices(rows.layers)
            choices.add(reads.context, reads.tree, rows)
            self._exchanged_oracles[key] = self.oracle.following(reads.case, choices)
        return self._exchanged_oracles[key]

    def _scored(self, kind: str, reads: Reads, path: ExchangePath = ()) -> ScoredChoices | None:
        key = (kind, *_question(reads), path)
        if key not in self._scored_choices:
            oracle = self._oracle_after(reads, path)
            assert isinstance(oracle, Follows)
            self._scored_choices[key] = oracle.scored_choices(kind, reads.case, reads.context, reads.tree)
        return self._scored_choices[key]

    def _margins(self, kind: str, reads: Reads, path: ExchangePath = ()) -> Array:
        """How near each row lies to another choice, [layers, rows]."""
        key = (kind, *_question(reads), path)
        if key not in self._known_margins:
            scored = self._scored(kind, reads, path)
            assert scored is not None
            self._known_margins[key] = scored.margins()
        return self._known_margins[key]

    def _limits(self, kind: str, reads: Reads, path: ExchangePath = ()) -> Array:
        """The largest gap of a tie in each row, [layers, rows]."""
        key = (kind, *_question(reads), path)
        if key not in self._tie_limits:
            oracle = self._oracle_after(reads, path)
            assert isinstance(oracle, Follows)
            units = tie_units(kind, reads.case, oracle, reads.context, reads.tree)
            assert units is not None
            self._tie_limits[key] = tie_limits(reads.case.dtype, units)
        return self._tie_limits[key]

    def _shown_choices(self, kind: str, reads: Reads) -> Array:
        """The choices of the rows that the backend shows, [layers, rows, taken]; UNKNOWN for the others."""
        scored = self._scored(kind, reads)
        choices = getattr(self.oracle, "choices", None)
        assert scored is not None
        followed_case = getattr(self.oracle, "case", None)
        on_target = followed_case is not None and _is_same_target(reads.case, followed_case)
        row_choices = (
            choices.of(reads.context, reads.tree).of(kind) if isinstance(choices, Choices) and on_target else None
        )
        unknown = np.full(scored.chosen.shape, UNKNOWN)
        return unknown if row_choices is None else same_width(row_choices, unknown)[0]


def _is_same_target(first: Case, second: Case) -> bool:
    """Whether two cases have one target, whose columns both store alike."""
    return first.model == second.model and first.layout.rounding == second.layout.rounding


def _end(kind: str, reads: Reads, layers: int) -> int:
    """The layer behind the last one of which the row of `reads` reads the choices of a kind, of so many layers."""
    return layers if reads.before is None else reads.before + (reads.attends and kind == COLUMNS)


def _question(reads: Reads) -> tuple[object, ...]:
    return reads.case.model, reads.case.dtype, reads.context, reads.tree
