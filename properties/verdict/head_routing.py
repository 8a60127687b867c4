"""Rule T for the experts of a draft head.

No trace shows them: a tied row of the head may go through either expert. A difference of the head's scores is excused
up to the move that tied experts make: the oracle exchanges the experts of each tied row that the scores read, one at a
time, and looks how far they move. These moves are added. A difference that goes further is a finding. An excused one is
counted as a routing tie.
"""

from typing import Protocol, runtime_checkable

import numpy as np

from specverify.properties.verdict.finding import Finding, Reads, RoutingTie
from specverify.properties.verdict.followed import MOVED, ROUNDOFF, TIE_SIGMA, sigma
from specverify.properties.verdict.invariant import Oracle
from specverify.reference.case import Case
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.amplification import PERTURBED
from specverify.reference.oracle.draft.eagle1 import NO_EXCHANGES, Exchanges, HeadRun

MOST_SITES = 32
"""Most ties of one difference whose experts are exchanged, the nearest first; further ones grant nothing."""

MOST_EXCHANGES = 4
"""Most exchanges of one tied row in one layer."""


@runtime_checkable
class RunsHeads(Protocol):
    """An oracle that can run a head with experts, some rows taking others than their own."""

    def head_run(
        self, case: Case, tokens: tuple[int, ...], path: tuple[int, ...], exchanges: Exchanges = NO_EXCHANGES
    ) -> HeadRun | None:
        """See `specverify.reference.oracle.decoder.Oracle.head_run`."""
        ...

    def neighbours(self) -> tuple[Oracle, ...]:
        """See `specverify.reference.oracle.decoder.Oracle.neighbours`."""
        ...


def explain_by_head(finding: Finding, oracle: Oracle) -> RoutingTie | None:
    """The nearest of the ties of a head's experts that explain `finding` together; None where they do not."""
    reads = finding.reads
    if reads is None or not reads.by_head or reads.node is None or finding.measure is None:
        return None
    needed = (finding.measure - 1) * reads.limit
    if not np.isfinite(needed):
        return None
    try:
        base = _run(oracle, reads)
        if base is None:
            return None
        granted = 0.0
        sites = tied_rows(oracle, reads, base)[:MOST_SITES]
        for _, number in sites:
            layer, row, router = base.routers[number]
            moves = [0.0]
            for _, experts in router.exchanges(0, np.inf)[:MOST_EXCHANGES]:
                moved = _run(oracle, reads, {(layer, row): tuple(experts.tolist())})
                assert moved is not None
                moves.append(float(np.sqrt(np.mean(np.square(moved.scores - base.scores)))))
            granted += max(moves)
            if granted >= needed:
                gap, nearest = sites[0]
                layer, row, _ = base.routers[nearest]
                return RoutingTie(finding.invariant, finding.step, layer, row, gap, float(needed), granted)
    except Malformed:
        return None
    return None


def has_tied_row(oracle: Oracle, reads: Reads) -> bool:
    """Whether the head's scores that `reads` names depend on a choice of experts that is a tie."""
    base = _run(oracle, reads)
    return base is not None and bool(tied_rows(oracle, reads, base))


def tied_rows(oracle: Oracle, reads: Reads, base: HeadRun) -> list[tuple[float, int]]:
    """The choices of `base` that are ties, the nearest first: (gap in sigmas, number in `base.routers`).

    In the last layer no row before the root's is looked at: what its experts add there, no other row reads. Below the
    root a row of the head begins with the output of its parent's row.
    A gap is a tie up to TIE_SIGMA sigmas of target and head together, or MOVED times what a change of the target's
    weights by the unit roundoff moves the scores of the row.
    """
    dtype = reads.case.dtype
    unit = sigma(dtype, base.depth)
    neighbours: tuple[Oracle, ...] = oracle.neighbours() if isinstance(oracle, RunsHeads) else ()
    runs = [run for run in (_run(neighbour, reads) for neighbour in neighbours) if run is not None]
    ties = []
    last_layer = max(layer for layer, _, _ in base.routers)
    assert reads.node is not None
    root_row = max(row for _, row, _ in base.routers) - reads.tree.depth[reads.node]
    for number, (layer, row, router) in enumerate(base.routers):
        if layer == last_layer and row < root_row:
            continue
        margin = float(router.margins()[0])
        moves = [np.abs(run.routers[number][2].scores - router.scores).max() / PERTURBED for run in runs]
        movement = float(np.sqrt(np.mean(np.square(moves)))) / router.size if moves else 0.0
        if margin <= max(TIE_SIGMA * unit, MOVED * ROUNDOFF[dtype] * movement):
            ties.append((margin / unit, number))
    return sorted(ties)


def _run(oracle: Oracle, reads: Reads, exchanges: Exchanges = NO_EXCHANGES) -> HeadRun | None:
    """The head of `reads` on the path that it names, by `oracle`."""
    if not isinstance(oracle, RunsHeads) or reads.node is None:
        return None
    root, *path = reads.tree.tokens_to(reads.node)
    return oracle.head_run(reads.case, (*reads.context, root), tuple(path), exchanges)
