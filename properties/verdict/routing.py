"""Rule T for experts that are not shown: a tied row may have gone through either expert.

Where a backend shows the experts of its rows, the oracle takes the same ones (`properties.verdict.followed`), and no
tie excuses anything. Where it does not, a difference is excused up to the move that tied experts make: the oracle
exchanges the experts of each tied row that the difference reads, in the layers that it reads, and looks how far its own
row moves. The moves of single exchanges are added. A difference that goes further is a finding. An excused one is
counted as a routing tie, and never dropped: a verdict, a run and its page count routing ties of their own.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from properties.verdict.finding import Finding, Reads, RoutingTie
from properties.verdict.followed import Follows, can_follow, sigma, tie_limits, tie_units
from properties.verdict.invariant import Oracle
from reference.malformed import Malformed
from reference.oracle.choices import Choices
from reference.oracle.evaluator import Routing
from reference.oracle.formulas.routers import UNKNOWN
from reference.trace import Array, Step

MOST_SITES = 32
"""Most ties of one difference whose experts are exchanged, the nearest first; further ones grant nothing."""

MOST_EXCHANGES = 4
"""Most exchanges of one tied row in one layer."""

Site = tuple[float, int, int]
"""A tie: its gap in sigmas, its layer and its row."""


@dataclass
class Exchanges:
    """The oracle of one case with tied experts exchanged; it remembers what it was asked.

    Attributes:
        oracle: The oracle, with the experts that the backend shows.
    """

    oracle: Oracle
    _routings: dict[object, Routing | None] = field(default_factory=dict)
    _kept_limits: dict[object, Array] = field(default_factory=dict)
    _others: dict[object, Oracle] = field(default_factory=dict)

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
            base = reads.row(self.oracle) if sites else None
            if base is None:
                return None
            granted = 0.0
            for site in sites[:MOST_SITES]:
                granted += self._move(reads, site, base)
                if granted >= needed:
                    gap, layer, row = sites[0]
                    return RoutingTie(finding.invariant, finding.step, layer, row, gap, float(needed), granted)
        except Malformed:
            return None
        return None

    def sites(self, reads: Reads) -> list[Site]:
        """The ties between experts in the rows and layers that `reads` names and does not know, the nearest first."""
        routing = self._routing(reads)
        if routing is None:
            return []
        margins, limits = routing.margins(), self._limits(reads)
        near = margins / sigma(reads.case.dtype, len(margins))
        unknown = (self._known(reads) == UNKNOWN).any(axis=-1)
        above = len(reads.context)
        nodes = range(len(reads.tree)) if reads.node is None else reads.tree.path(reads.node)
        rows = [*range(above), *(above + node for node in nodes)]
        layers = range(len(margins) if reads.before is None else reads.before)
        return sorted(
            (float(near[layer, row]), layer, row)
            for layer in layers
            for row in rows
            if unknown[layer, row] and margins[layer, row] <= limits[layer, row]
        )

    def clear(self, step: Step, reads: Reads) -> bool:
        """Whether some node of `step` has no tie in its rows, in any layer; `reads` names the case and its oracle."""
        if step.drafted is None:
            return False
        tree = step.drafted.tree
        whole = replace(reads, context=step.context, tree=tree, before=None)
        return any(not self.sites(replace(whole, node=node)) for node in range(len(tree)))

    def _move(self, reads: Reads, site: Site, base: Array) -> float:
        """The largest rms change of the row by an exchange of experts at `site`."""
        _, layer, row = site
        routing = self._routing(reads)
        assert routing is not None
        router = routing.routers[layer]
        assert router is not None
        limit = self._limits(reads)[layer, row]
        moves = [0.0]
        for _, experts in router.exchanges(row, float(limit))[:MOST_EXCHANGES]:
            moved = reads.row(self._exchanged(reads, layer, row, experts))
            if moved is not None and moved.shape == base.shape:
                moves.append(float(np.sqrt(np.nanmean(np.square(moved - base)))))
        return max(moves)

    def _exchanged(self, reads: Reads, layer: int, row: int, experts: Array) -> Oracle:
        """The oracle with `experts` in one row of one layer, the backend's where they are shown, its own elsewhere."""
        key = (*_place(reads), layer, row, tuple(experts.tolist()))
        if key not in self._others:
            chosen = self._known(reads)
            chosen[layer, row] = experts
            choices = Choices(chosen.shape[0], chosen.shape[2])
            choices.add(reads.context, reads.tree, chosen)
            assert isinstance(self.oracle, Follows)
            self._others[key] = self.oracle.following(reads.case.model, choices)
        return self._others[key]

    def _routing(self, reads: Reads) -> Routing | None:
        key = _place(reads)
        if key not in self._routings:
            assert isinstance(self.oracle, Follows)
            self._routings[key] = self.oracle.routing(reads.case, reads.context, reads.tree)
        return self._routings[key]

    def _limits(self, reads: Reads) -> Array:
        """The largest gap of a tie in each row, [layers, rows]."""
        key = ("limits", *_place(reads))
        if key not in self._kept_limits:
            assert isinstance(self.oracle, Follows)
            units = tie_units(reads.case, self.oracle, reads.context, reads.tree)
            assert units is not None
            self._kept_limits[key] = tie_limits(reads.case.dtype, units)
        return self._kept_limits[key]

    def _known(self, reads: Reads) -> Array:
        """The experts of the rows that the backend shows, [layers, rows, taken]; UNKNOWN for the others."""
        routing, choices = self._routing(reads), getattr(self.oracle, "choices", None)
        assert routing is not None
        own = reads.case.model == getattr(self.oracle, "target", None)
        if isinstance(choices, Choices) and own:
            return choices.of(reads.context, reads.tree)
        return np.full(routing.chosen.shape, UNKNOWN)


def _place(reads: Reads) -> tuple[object, ...]:
    return reads.case.model, reads.case.dtype, reads.context, reads.tree
