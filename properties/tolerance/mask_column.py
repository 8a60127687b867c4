"""The mask column behind a wrong attention output.

It is the one cell of the mask that explains the output if it is flipped.
"""

from typing import Protocol, runtime_checkable

import numpy as np

from specverify.properties.tolerance.closeness import EXACT, rms
from specverify.properties.verdict.invariant import Oracle
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.model import Inputs, attention
from specverify.reference.trace import Array, Step
from specverify.reference.tree import Tree

EXPLAINED = 0.9
"""Share of the squared difference for which a column must account."""

CHANCE = 1e-3
"""Largest probability that some column explains by chance a difference that has nothing to do with columns."""


@runtime_checkable
class ShowsInputs(Protocol):
    """An oracle that also shows the inputs of attention; another backend in the oracle's place does not."""

    def inputs(self, case: Case, context: tuple[int, ...], tree: Tree) -> Inputs:
        """Queries, keys and values at each node of `tree` after `context`."""
        ...


def mask_column(
    case: Case, oracle: Oracle, oracle_step: Step, output: Array, place: tuple[int, int, int], limit: float
) -> dict[str, int | str]:
    """The column that, shown to the row or hidden from it against the mask, gives the backend's attention output.

    The cell of every column of context and tree is flipped in turn, and attention is computed with the oracle's own
    queries, keys and values. A column is named only if the remaining difference lies within the row's noise, is at most
    a tenth of the squared difference, and no other column does as well. In 16 bits noise is so large that a column may
    do so by chance: the remaining share must be one that chance leaves in fewer than one row of a thousand, or no
    column is named. `output` [head_dim] is the backend's at `place` (layer, head, node), and `limit` the rms distance
    that noise may have. The coordinates are `column` and `cause`; `cause` alone where no single column explains the
    output; none where a column might explain it by chance, or where the oracle does not show the inputs of attention.
    """
    if (
        not isinstance(oracle, ShowsInputs)
        or oracle_step.drafted is None
        or oracle_step.lowered is None
        or oracle_step.lowered.visible is None
    ):
        return {}
    layer, head, node = place
    try:
        inputs = oracle.inputs(case, oracle_step.context, oracle_step.drafted.tree)
    except Malformed:
        return {}
    # Grouped queries: `group` query heads share one KV head.
    group = len(inputs.queries[layer]) // len(inputs.keys[layer])
    query = inputs.queries[layer][head : head + 1, node] * inputs.scale
    # The scale is in the query, so that `attention` is called with 1.0.
    keys, values = (arrays[layer][head // group] for arrays in (inputs.keys, inputs.values))
    output = output[: values.shape[-1]]  # behind it stand the zeros of a layer with narrower heads than another
    visible = oracle_step.lowered.visible[layer][node]
    if not np.isfinite(output).all() or len(visible) != len(keys):
        return {"cause": NO_COLUMN}
    # A checkpoint's cap is not in the case; the check below notices where it matters.
    cap = case.model.architecture.score_cap if isinstance(case.model, Seeded) else 0.0
    if (
        oracle_step.attended is not None
        and _residual(query, keys, values, visible, oracle_step.attended.output[place][: len(output)], cap) > EXACT
    ):
        return {}  # the formula does not give the oracle's own output: a checkpoint with another scale, a cap or sinks
    residuals = np.array(
        [_residual(query, keys, values, _flip(visible, column), output, cap) for column in range(len(visible))]
    )
    # `residuals` remain with one cell flipped, `mask_residual` under the mask as it must be.
    mask_residual = _residual(query, keys, values, visible, output, cap)
    explaining = np.flatnonzero(residuals <= min(limit, float(np.sqrt(1 - EXPLAINED)) * mask_residual))
    if not len(explaining):
        return {"cause": NO_COLUMN}
    if (residuals[explaining] > mask_residual * _chance_shares(visible, len(output))[explaining]).any():
        return {}
    if len(explaining) > 1:
        return {"cause": "one of columns " + _list_columns(explaining)}
    column = int(explaining[0])
    return {"column": column, "cause": MISSING if visible[column] else EXTRA}


EXTRA, MISSING, NO_COLUMN = "extra column", "missing column", "no single column"
"""The values of `cause`: the row saw a hidden column, missed a visible one, or no single column explains it."""


def _chance_shares(visible: Array, head_dim: int) -> Array:
    """For each column, the share of a difference that it may leave over without explaining it by chance (CHANCE).

    An error that has nothing to do with columns leaves a share r with a probability of about r to the power of the
    dimensions in which the error may move the output, and every column is tried. Wrong scores move the output only
    between the values of visible columns: in one dimension fewer than there are such columns, and [head_dim] at most.
    They bring in no hidden column, so for hidden columns all [head_dim] dimensions count.
    """
    dimensions = max(1, min(head_dim, int(visible.sum()) - 1))
    freedom = np.where(visible, dimensions, head_dim)
    return np.asarray((CHANCE / len(visible)) ** (1.0 / freedom))


def _flip(visible: Array, column: int) -> Array:
    flipped: Array = visible.copy()
    flipped[column] = ~flipped[column]
    return flipped


def _residual(query: Array, keys: Array, values: Array, visible: Array, output: Array, cap: float) -> float:
    """Rms distance of `output` to attention over the columns `visible` with soft cap `cap`.

    It is infinite if no column is visible. `query` is scaled already.
    """
    if not visible.any():
        return float("inf")
    return float(rms(output - attention(query, keys[visible][:, None], values[visible][:, None], 1.0, cap)[0]))


def _list_columns(columns: Array) -> str:
    names = [str(int(column)) for column in columns[:4]]
    return ", ".join(names) + (f" and {len(columns) - 4} more" if len(columns) > 4 else "")
