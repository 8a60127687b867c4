"""Amplification: a row of logits that shows more of the roundings than others.

Rule N takes the backend's error in plain decode as its unit, an average over a few rows. One row can be many times
worse conditioned than those. In a model whose norms stand behind blocks (EXAONE 4, OLMo 2) a block's sum may nearly
vanish at one node: the norm then enlarges what rounding left of it. The oracle says by how much. It changes all weights
by one part in 2**24 and looks how far each row of logits moves (`reference.oracle.evaluator.amplification`).

A row that moves r times as far as the rows of plain decode move may lie r times as far off. The factor comes from the
oracle alone, so that no fault of a backend widens it, and it is asked for only where a row would be a finding.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from properties.verdict.invariant import Oracle
from reference.case import Case
from reference.malformed import Malformed
from reference.trace import Array, Step
from reference.tree import Tree

MOST = 64.0
"""A row beyond its limit by more than this factor is a finding, however ill-conditioned it may be.

One of some 22,000 drawn cases came to need a factor: 1.2, where the oracle grants 9.8.
"""


@runtime_checkable
class Amplifies(Protocol):
    """An oracle that knows how rows amplify roundings; plain transformers in its place does not."""

    def amplification(self, case: Case, context: tuple[int, ...], tree: Tree) -> Array | None:
        """Rms change of each node's logits over the relative change of weights, [nodes]; None without weights."""
        ...


@dataclass(frozen=True)
class Amplification:
    """How rows of a case's target amplify roundings, against the rows of plain decode.

    Attributes:
        control: The plain decode, as a case.
        tree: The tokens of that plain decode, as a tree without branches.
        oracle: The oracle; one that knows no amplification excuses nothing.
    """

    control: Case
    tree: Tree
    oracle: Oracle

    def excuses(self, step: Step, node: int, measure: float) -> bool:
        """Whether row `node` of `step` may lie `measure` times as far off as rows in general."""
        # NaN is compared so that it is excused by nothing.
        if step.drafted is None or not measure <= MOST or not isinstance(self.oracle, Amplifies):
            return False
        try:
            rows = self.oracle.amplification(self.control, step.context, step.drafted.tree)
            usual = self.oracle.amplification(self.control, self.control.prefix, self.tree)
        except Malformed:
            return False
        if rows is None or usual is None:
            return False
        return bool(rows[node] >= measure * np.sqrt(np.mean(np.square(usual))))
