"""The mask of a step as two grids: what each node must see, and what it saw."""

from dataclasses import dataclass

import numpy as np

from specverify.properties.tolerance.mask_column import EXTRA, MISSING
from specverify.reference.trace import Array, Stage
from specverify.reference.tree import Tree
from specverify.reports.format import plural
from specverify.reports.html.pictures.grid import Cell, Grid, Row, omission, shown_indices
from specverify.reports.html.pictures.step_truth import StepTruth


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
    expected_masks = _unpadded_masks(
        truth.oracle_step.lowered.visible if truth.oracle_step and truth.oracle_step.lowered else None, shape
    )
    observed_masks = _unpadded_masks(truth.step.lowered.visible if truth.step.lowered else None, shape)
    layer = _first_layer(truth, expected_masks, observed_masks)
    expected = expected_masks[layer] if layer < len(expected_masks) else None
    observed = observed_masks[layer] if layer < len(observed_masks) else None
    title = f"What each node saw: the mask of layer {layer}"
    attended_cell = _attended_cell(truth, shape)
    if attended_cell is not None:
        # The mask may be right and attention wrong: then the grid shows what attention did.
        base = observed if observed is not None else expected
        if base is not None:
            observed = base.copy()
            observed[attended_cell] = truth.finding.where["cause"] == EXTRA
            title = f"What each node saw: attention of layer {layer}"
    if expected is None and observed is None:
        return None
    named_cell = _named_cell(truth, shape) if attended_cell is None else attended_cell
    wrong_cells = np.empty((0, 2), dtype=int)
    if expected is not None and observed is not None:
        wrong_cells = np.argwhere(expected != observed)
    rows = shown_indices(nodes, [row for row in [named_cell[0], *wrong_cells[:, 0].tolist()] if row is not None])
    columns = shown_indices(
        context + nodes, [column for column in [named_cell[1], *wrong_cells[:, 1].tolist()] if column is not None]
    )
    frame = _Frame(tree, context, rows, columns, named_cell)
    expected_grid = observed_grid = node_pair = None
    sentence = ""
    if expected is not None:
        expected_title = f"What each node must see in layer {layer}"
        expected_grid = frame.grid(expected_title, expected, expected if observed is None else observed)
        sentence = _sentence(wrong_cells, expected, frame, named_cell)
    if observed is not None:
        observed_grid = frame.grid(title, observed, observed if expected is None else expected)
        if len(wrong_cells):
            node_pair = _node_pair(_first_wrong(wrong_cells, named_cell), observed, context)
    return MaskPicture(expected_grid, observed_grid, sentence, len(wrong_cells), node_pair)


def _unpadded_masks(masks: tuple[Array, ...] | None, shape: tuple[int, int]) -> list[Array]:
    """The masks of all layers without padding; none where a mask is too small for tree and context."""
    unpadded = [] if masks is None else [np.asarray(mask, dtype=bool)[: shape[0], : shape[1]] for mask in masks]
    return unpadded if all(mask.shape == shape for mask in unpadded) else []


def _first_layer(truth: StepTruth, expected_masks: list[Array], observed_masks: list[Array]) -> int:
    named_layer = truth.finding.where.get("layer")
    if isinstance(named_layer, int) and 0 <= named_layer < max(len(expected_masks), len(observed_masks)):
        return named_layer
    pairs = enumerate(zip(expected_masks, observed_masks, strict=False))
    return next((layer for layer, (expected, observed) in pairs if not np.array_equal(expected, observed)), 0)


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

    def column(self, column: int) -> str:
        """A column in words."""
        return f"committed token {column}" if column < self.context else f"node {column - self.context}"

    def grid(self, title: str, mask: Array, other_mask: Array) -> Grid:
        """The grid of `mask`; cells in which `other_mask` differs are wrong."""
        before = sum(column < self.context for column in self.columns)
        groups = [("committed tokens", before), ("nodes of the tree", len(self.columns) - before)]
        parts = [(len(mask), len(self.rows), "rows"), (mask.shape[1], len(self.columns), "columns")]
        return Grid(
            title,
            tuple(str(column if column < self.context else column - self.context) for column in self.columns),
            tuple(
                Row(
                    f"node {row}",
                    tuple(
                        self._cell(row, column, bool(mask[row, column]), bool(other_mask[row, column]))
                        for column in self.columns
                    ),
                    row == self.named_cell[0],
                )
                for row in self.rows
            ),
            "",
            tuple(group for group in groups if group[1]),
            omission(parts),
        )

    def _cell(self, row: int, column: int, visible: bool, other_visible: bool) -> Cell:
        sees = "sees" if visible else "does not see"
        differs = visible != other_visible
        words = f"node {row} {sees} {self.column(column)}" + (" (the two masks differ here)" if differs else "")
        return Cell(
            "on" if visible else "off", "●" if visible else "·", words, differs, (row, column) == self.named_cell
        )


def _sentence(wrong_cells: Array, expected: Array, frame: _Frame, named_cell: tuple[int | None, int | None]) -> str:
    if not len(wrong_cells):
        return ""
    row, column = _first_wrong(wrong_cells, named_cell)
    column_words = frame.column(column)
    error = f"must see {column_words} and does not" if expected[row, column] else f"sees {column_words} and must not"
    more = f"; {plural(len(wrong_cells) - 1, 'further cell')} of this mask differ" if len(wrong_cells) > 1 else ""
    return f"Node {row} {error}{more}."


def _first_wrong(wrong_cells: Array, named_cell: tuple[int | None, int | None]) -> tuple[int, int]:
    """The wrong cell that the finding names, or otherwise the first one."""
    cells = [(int(row), int(column)) for row, column in wrong_cells]
    return next((cell for cell in cells if cell == named_cell), cells[0])


def _node_pair(cell: tuple[int, int], observed: Array, context: int) -> tuple[int, int, bool] | None:
    row, column = cell
    return None if column < context else (row, column - context, bool(observed[cell]))
