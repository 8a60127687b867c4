"""Rule T for the choice of experts: a tied row may go through either expert.

A difference in such a row, or below it, is counted as a routing tie in place of a finding. It is never dropped: a
verdict, a run and its page count routing ties of their own.
"""

from typing import Protocol, runtime_checkable

import numpy as np

from properties.verdict.finding import Finding, RoutingTie
from properties.verdict.invariant import Oracle
from reference.case import Case
from reference.malformed import Malformed
from reference.trace import Array, Step, Trace
from reference.tree import Tree

NOISE = {"float64": 5 * 2.0**-53, "float32": 5 * 2.0**-24, "bfloat16": 1.65 * 2.0**-8, "float16": 1.65 * 2.0**-11}
"""The least error of scores, relative to their rms, for one layer: that of logits (`tolerance.closeness.PRIOR`)."""

TIE_SIGMA = 8.0
"""Largest gap of a tie, in these units; that of tokens (`tolerance.ties.TIE_SIGMA`)."""


@runtime_checkable
class Routes(Protocol):
    """An oracle that knows how far the scores of experts lie apart; plain transformers in its place does not."""

    def router_margins(self, case: Case, context: tuple[int, ...], tree: Tree) -> Array | None:
        """Margins of the rows of context and tree over the rms of the scores, [layers, rows]; None without experts."""
        ...


def sigma(dtype: str, layers: int) -> float:
    """The error of scores that rounding makes in so many layers, relative to their rms: the unit of margins."""
    return float(np.sqrt(layers) * NOISE[dtype])


def routing_tie(finding: Finding, case: Case, oracle: Oracle, trace: Trace | None) -> RoutingTie | None:
    """The routing tie that may explain `finding`: the nearest one in its row or above it; None where there is none.

    Tokens and numbers alone can follow from a tie: a finding without a measure asks for equality.
    """
    mixes = case.model.mixes_rows and isinstance(oracle, Routes)
    if not mixes or finding.measure is None or trace is None or finding.step >= len(trace.steps):
        return None
    step = trace.steps[finding.step]
    if step.drafted is None:
        return None
    assert isinstance(oracle, Routes)
    try:
        margins = oracle.router_margins(case, step.context, step.drafted.tree)
    except Malformed:
        return None
    if margins is None:
        return None
    rows = _rows(finding, step, step.drafted.tree)
    near = margins[:, rows] / sigma(case.dtype, len(margins))
    if near.min() > TIE_SIGMA:
        return None
    layer, row = np.unravel_index(int(near.argmin()), near.shape)
    return RoutingTie(finding.invariant, finding.step, int(layer), rows[int(row)], float(near.min()))


def parted(
    findings: list[Finding], case: Case, oracle: Oracle, trace: Trace | None
) -> tuple[list[Finding], list[RoutingTie]]:
    """The findings that no tie between experts may explain, and the ties that may explain the others."""
    pairs = [(finding, routing_tie(finding, case, oracle, trace)) for finding in findings]
    return [finding for finding, tie in pairs if tie is None], [tie for _, tie in pairs if tie is not None]


def _rows(finding: Finding, step: Step, tree: Tree) -> list[int]:
    """The context and the path to the finding's node; all rows of the step where the finding names no node."""
    above, node = len(step.context), finding.where.get("node")
    # A finding about a variant of the case may name a node that the case's own tree lacks.
    named = isinstance(node, int) and node < len(tree)
    nodes = tree.path(node) if isinstance(node, int) and named else tuple(range(len(tree)))
    return [*range(above), *(above + one for one in nodes)]
