"""The mask of a step as two grids: what each node must see, and what it saw."""

from dataclasses import dataclass

import numpy as np

from properties.tolerance.mask_column import EXTRA, MISSING
from reference.trace import Array, Stage
from reference.tree import Tree
from reports.format import plural
from reports.html.pictures.grid import Cell, Grid, Row, omission, shown_indices
from reports.html.pictures.step_truth import StepTruth


@dataclass(frozen=True)
class MaskPicture:
    """The mask of one layer.

    Attributes:
        expected: The mask as it must be; None where the oracle's is not known.
        observed: The mask as the backend had it; None where the trace does not show it.
        words: The wrong cells in one sentence; empty where there are none.
        wrong: The number of wrong cells in this layer.
        cell: A wrong cell between two nodes of the tree: a node, the other node, and whether it saw that; or None.
    """

    expected: Grid | None
    observed: Grid | None
    words: str
    wrong: int
    cell: tuple[int, int, bool] | None = None


def mask_picture(truth: StepTruth) -> MaskPicture | None:
    """The mask of the finding's layer, or of the first layer that differs; None where there is nothing to draw."""
    tree = truth.tree
    if tree is None or truth.step is None:
        return None
    context, nodes = len(truth.step.context), len(tree)
    shape = (nodes, context + nodes)
    wanted = _unpadded_masks(
        truth.oracle_step.lowered.visible if truth.oracle_step and truth.oracle_step.lowered else None, shape
    )
    seen = _unpadded_masks(truth.step.lowered.visible if truth.step.lowered else None, shape)
    layer = _first_layer(truth, wanted, seen)
    must = wanted[layer] if layer < len(wanted) else None
    did = seen[layer] if layer < len(seen) else None
    title = f"What each node saw: the mask of layer {layer}"
    cell = _attended_cell(truth, shape)
    if cell is not None:
        # The mask may be right and attention wrong: then the grid shows what attention did.
        base = did if did is not None else must
        if base is not None:
            did = base.copy()
            did[cell] = truth.finding.where["cause"] == EXTRA
            title = f"What each node saw: attention of layer {layer}"
    if must is None and did is None:
        return None
    where = _named_cell(truth, shape) if cell is None else cell
    wrong = np.argwhere(must != did) if must is not None and did is not None else np.empty((0, 2), dtype=int)
    rows = shown_indices(nodes, [row for row in [where[0], *wrong[:, 0].tolist()] if row is not None])
    columns = shown_indices(context + nodes, [one for one in [where[1], *wrong[:, 1].tolist()] if one is not None])
    frame = _Frame(tree, context, rows, columns, where)
    return MaskPicture(
        None
        if must is None
        else frame.grid(f"What each node must see in layer {layer}", must, must if did is None else did),
        None if did is None else frame.grid(title, did, did if must is None else must),
        _sentence(wrong, must, frame, where) if must is not None else "",
        len(wrong),
        None if did is None or not len(wrong) else _node_pair(_first_wrong(wrong, where), did, context),
    )


def _unpadded_masks(masks: tuple[Array, ...] | None, shape: tuple[int, int]) -> list[Array]:
    """The masks of all layers without padding; none where a mask is too small for tree and context."""
    whole = [] if masks is None else [np.asarray(one, dtype=bool)[: shape[0], : shape[1]] for one in masks]
    return whole if all(one.shape == shape for one in whole) else []


def _first_layer(truth: StepTruth, wanted: list[Array], seen: list[Array]) -> int:
    named = truth.finding.where.get("layer")
    if isinstance(named, int) and 0 <= named < max(len(wanted), len(seen)):
        return named
    pairs = enumerate(zip(wanted, seen, strict=False))
    return next((layer for layer, (one, other) in pairs if not np.array_equal(one, other)), 0)


def _attended_cell(truth: StepTruth, shape: tuple[int, int]) -> tuple[int, int] | None:
    """The cell that alone explains a wrong output of attention, where the finding names one."""
    where = truth.finding.where
    node, column = where.get("node"), where.get("column")
    if truth.finding.stage is not Stage.ATTENDED or where.get("cause") not in (EXTRA, MISSING):
        return None
    if not isinstance(node, int) or not isinstance(column, int):
        return None
    return (node, column) if 0 <= node < shape[0] and 0 <= column < shape[1] else None


def _named_cell(truth: StepTruth, shape: tuple[int, int]) -> tuple[int | None, int | None]:
    """Row and column of the finding, as far as it names them."""
    where = truth.finding.where
    row, column = where.get("row", truth.scene.node), where.get("column")
    return (
        row if isinstance(row, int) and 0 <= row < shape[0] else None,
        column if isinstance(column, int) and 0 <= column < shape[1] else None,
    )


@dataclass(frozen=True)
class _Frame:
    """The rows and columns that both grids show."""

    tree: Tree
    context: int
    rows: list[int]
    columns: list[int]
    named_cell: tuple[int | None, int | None]

    def column(self, at: int) -> str:
        """A column in words."""
        return f"committed token {at}" if at < self.context else f"node {at - self.context}"

    def grid(self, title: str, mask: Array, other: Array) -> Grid:
        """The grid of `mask`; cells in which `other` differs are wrong."""
        before = sum(at < self.context for at in self.columns)
        groups = [("committed tokens", before), ("nodes of the tree", len(self.columns) - before)]
        parts = [(len(mask), len(self.rows), "rows"), (mask.shape[1], len(self.columns), "columns")]
        return Grid(
            title,
            tuple(str(at if at < self.context else at - self.context) for at in self.columns),
            tuple(
                Row(
                    f"node {row}",
                    tuple(self._cell(row, at, bool(mask[row, at]), bool(other[row, at])) for at in self.columns),
                    row == self.named_cell[0],
                )
                for row in self.rows
            ),
            "",
            tuple(group for group in groups if group[1]),
            omission(parts),
        )

    def _cell(self, row: int, column: int, mine: bool, other: bool) -> Cell:
        sees = "sees" if mine else "does not see"
        differs = mine != other
        words = f"node {row} {sees} {self.column(column)}" + (" (the two masks differ here)" if differs else "")
        return Cell("on" if mine else "off", "●" if mine else "·", words, differs, (row, column) == self.named_cell)


def _sentence(wrong: Array, must: Array, frame: _Frame, here: tuple[int | None, int | None]) -> str:
    if not len(wrong):
        return ""
    row, column = _first_wrong(wrong, here)
    named = frame.column(column)
    seen = f"must see {named} and does not" if must[row, column] else f"sees {named} and must not"
    more = f"; {plural(len(wrong) - 1, 'further cell')} of this mask differ" if len(wrong) > 1 else ""
    return f"Node {row} {seen}{more}."


def _first_wrong(wrong: Array, here: tuple[int | None, int | None]) -> tuple[int, int]:
    """The wrong cell that the finding names, or otherwise the first one."""
    cells = [(int(row), int(column)) for row, column in wrong]
    return next((cell for cell in cells if cell == here), cells[0])


def _node_pair(cell: tuple[int, int], did: Array, context: int) -> tuple[int, int, bool] | None:
    row, column = cell
    return None if column < context else (row, column - context, bool(did[cell]))
