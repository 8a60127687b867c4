"""Rule T for experts that are not shown: a tied row may have gone through either expert.

Where a backend shows the experts of its rows, the oracle takes the same ones
(`specverify.properties.verdict.followed`), and no
tie excuses anything. Where it does not, a difference is excused up to the move that tied experts make: the oracle
exchanges the experts of each tied row that the difference reads, in the layers that it reads, and looks how far its own
row moves. An exchange changes the scores below it, and may leave other ties there: these are exchanged behind it. Each
row of a layer grants the largest move that its exchange makes, alone or behind others, and these moves are added. A
difference that goes further is a finding. An excused one is counted as a routing tie, and never dropped: a verdict, a
run and its page count routing ties of their own.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from specverify.properties.verdict.finding import Finding, Reads, RoutingTie
from specverify.properties.verdict.followed import Follows, can_follow, sigma, tie_limits, tie_units
from specverify.properties.verdict.invariant import Oracle
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.choices import Choices
from specverify.reference.oracle.evaluator import Routing
from specverify.reference.oracle.formulas.routers import UNKNOWN
from specverify.reference.trace import Array, Step

MOST_SITES = 32
"""Most ties of one difference whose experts are exchanged, the nearest first, and as many again behind exchanges.

Further ones grant nothing.
"""

MOST_EXCHANGES = 4
"""Most exchanges of one tied row in one layer."""

MOST_BEHIND = 16
"""Most exchanges of one difference behind which further ties are looked for, those of fewest and nearest ties first."""

Site = tuple[float, int, int]
"""A tie: its gap in sigmas, its layer and its row."""

ExchangePath = tuple[tuple[int, int, tuple[int, ...]], ...]
"""Exchanges, each behind the one before it: a layer, a row, and the experts that it takes."""


@dataclass
class Exchanges:
    """The oracle of one case with tied experts exchanged; it remembers what it was asked.

    Attributes:
        oracle: The oracle, with the experts that the backend shows.
    """

    oracle: Oracle
    _routings: dict[object, Routing | None] = field(default_factory=dict)
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
            moves: dict[tuple[int, int], float] = {}
            for layer, row, move in self._moves(reads) if sites else ():
                moves[layer, row] = max(move, moves.get((layer, row), 0.0))
                granted = sum(moves.values())
                if granted >= needed:
                    gap, layer, row = sites[0]
                    return RoutingTie(finding.invariant, finding.step, layer, row, gap, float(needed), granted)
        except Malformed:
            return None
        return None

    def sites(self, reads: Reads, path: ExchangePath = ()) -> list[Site]:
        """The ties between experts in the rows and layers that `reads` names and does not know, the nearest first.

        Where exchanges come before, the ties are those of the layers below the last of them.
        """
        routing = self._routing(reads, path)
        if routing is None:
            return []
        margins = routing.margins()
        limits = self._limits(reads, path)
        near = margins / sigma(reads.case.dtype, len(margins))
        unknown = (self._shown_experts(reads) == UNKNOWN).any(axis=-1)
        above = len(reads.context)
        nodes = range(len(reads.tree)) if reads.node is None else reads.tree.path(reads.node)
        rows = [*range(above), *(above + node for node in nodes)]
        layers = range(path[-1][0] + 1 if path else 0, len(margins) if reads.before is None else reads.before)
        return sorted(
            (float(near[layer, row]), layer, row)
            for layer in layers
            for row in rows
            if unknown[layer, row] and margins[layer, row] <= limits[layer, row]
        )

    def has_clear_row(self, step: Step, reads: Reads) -> bool:
        """Whether some node of `step` has no tie in its rows, in any layer; `reads` names the case and its oracle."""
        if step.drafted is None:
            return False
        tree = step.drafted.tree
        node_reads = replace(reads, context=step.context, tree=tree, before=None)
        return any(not self.sites(replace(node_reads, node=node)) for node in range(len(tree)))

    def _moves(self, reads: Reads) -> Iterator[tuple[int, int, float]]:
        """The rms change of the row by each exchange: (layer, row, change); those behind fewer exchanges come first."""
        last = (len(self._limits(reads)) if reads.before is None else reads.before) - 1
        queue = deque[ExchangePath]([()])
        num_tried = 0
        sites_left = MOST_SITES
        while queue and num_tried <= MOST_BEHIND and sites_left:
            path = queue.popleft()
            num_tried += 1
            base = reads.row(self._oracle_after(reads, path))
            sites = [] if base is None else self.sites(reads, path)[:sites_left]
            sites_left -= len(sites) if path else 0
            for _, layer, row in sites:
                for experts in self._other_experts(reads, path, layer, row):
                    longer_path = (*path, (layer, row, experts))
                    moved_row = reads.row(self._oracle_after(reads, longer_path))
                    if moved_row is not None and base is not None and moved_row.shape == base.shape:
                        yield layer, row, float(np.sqrt(np.nanmean(np.square(moved_row - base))))
                    if layer < last:
                        queue.append(longer_path)

    def _other_experts(self, reads: Reads, path: ExchangePath, layer: int, row: int) -> list[tuple[int, ...]]:
        """The experts that a tied row may take in place of its own."""
        routing = self._routing(reads, path)
        router = None if routing is None else routing.routers[layer]
        limit = float(self._limits(reads, path)[layer, row])
        exchanges = [] if router is None else router.exchanges(row, limit)[:MOST_EXCHANGES]
        return [tuple(experts.tolist()) for _, experts in exchanges]

    def _oracle_after(self, reads: Reads, path: ExchangePath) -> Oracle:
        """The oracle with other experts in some rows, the backend's where they are shown, its own elsewhere."""
        if not path:
            return self.oracle
        key = (*_place(reads), path)
        if key not in self._exchanged_oracles:
            chosen = self._shown_experts(reads)
            for layer, row, experts in path:
                chosen[layer, row] = experts
            choices = Choices(chosen.shape[0], chosen.shape[2])
            choices.add(reads.context, reads.tree, chosen)
            assert isinstance(self.oracle, Follows)
            self._exchanged_oracles[key] = self.oracle.following(reads.case.model, choices)
        return self._exchanged_oracles[key]

    def _routing(self, reads: Reads, path: ExchangePath = ()) -> Routing | None:
        key = (*_place(reads), path)
        if key not in self._routings:
            oracle = self._oracle_after(reads, path)
            assert isinstance(oracle, Follows)
            self._routings[key] = oracle.routing(reads.case, reads.context, reads.tree)
        return self._routings[key]

    def _limits(self, reads: Reads, path: ExchangePath = ()) -> Array:
        """The largest gap of a tie in each row, [layers, rows]."""
        key = (*_place(reads), path)
        if key not in self._tie_limits:
            oracle = self._oracle_after(reads, path)
            assert isinstance(oracle, Follows)
            units = tie_units(reads.case, oracle, reads.context, reads.tree)
            assert units is not None
            self._tie_limits[key] = tie_limits(reads.case.dtype, units)
        return self._tie_limits[key]

    def _shown_experts(self, reads: Reads) -> Array:
        """The experts of the rows that the backend shows, [layers, rows, taken]; UNKNOWN for the others."""
        routing = self._routing(reads)
        choices = getattr(self.oracle, "choices", None)
        assert routing is not None
        on_target = reads.case.model == getattr(self.oracle, "target", None)
        if isinstance(choices, Choices) and on_target:
            return choices.experts_of(reads.context, reads.tree)
        return np.full(routing.chosen.shape, UNKNOWN)


def _place(reads: Reads) -> tuple[object, ...]:
    return reads.case.model, reads.case.dtype, reads.context, reads.tree
