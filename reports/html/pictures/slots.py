"""KV slots of a step: before it, as they must be after it, as they were."""

from dataclasses import dataclass

import numpy as np

from specverify.properties.tolerance.closeness import rms
from specverify.reference.oracle.model import Layers
from specverify.reference.trace import Array, Kv
from specverify.reference.tree import Tree
from specverify.reports.format import plural
from specverify.reports.html.pictures.grid import Cell, Grid, Row, omission, shown_indices
from specverify.reports.html.pictures.step_truth import StepTruth

ALIKE = {"float64": 1e-6, "float32": 1e-3, "bfloat16": 0.1, "float16": 0.02}
"""The largest distance, as a share of the size of all columns, at which a slot is said to hold a column's numbers."""

APART = 4.0
"""The wanted column may be so many times as far off as the nearest one, and is still the one that is named."""

MOST = 14
"""Most slots that are shown."""

UNKNOWN, NO_COLUMN = -1, -2
"""In place of a column: the oracle's numbers are not known, and numbers that are no column's."""


@dataclass(frozen=True)
class SlotsPicture:
    """The slots as a grid, and the wrong ones in a sentence; empty where no slot is known to be wrong."""

    grid: Grid
    words: str


def slots_picture(truth: StepTruth) -> SlotsPicture | None:
    """The slots of the target's cache around a commit; None where the trace does not show them."""
    step, tree = truth.step, truth.tree
    record = step.committed if step is not None else None
    # The draft's own cache is another one, whose slots this picture does not show.
    if step is None or tree is None or record is None or truth.finding.where.get("cache", "target") != "target":
        return None
    context = len(step.context)
    path = step.accepted.path if step.accepted is not None else ()
    expected_columns = _expected_columns(truth, context, path)
    held_columns = _held_columns(truth, record.after, expected_columns) if record.after is not None else []
    if not expected_columns or not held_columns:
        return None
    count = max(len(expected_columns), len(held_columns))
    held_columns += [None] * (count - len(held_columns))
    named_slot = truth.finding.where.get("slot", truth.finding.where.get("position"))
    wrong_slots = [
        slot for slot in range(count) if held_columns[slot] not in (_column_at(expected_columns, slot), UNKNOWN)
    ]
    shown_slots = shown_indices(count, [*([named_slot] if isinstance(named_slot, int) else []), *wrong_slots], MOST)
    written_columns = _written_columns(truth, tree, len(held_columns))
    names = _ColumnNames(truth.committed_tokens, tree, context)

    def row(name: str, columns: list[int | None], expected: list[int | None] | None = None) -> Row:
        cells = []
        for slot in shown_slots:
            column = columns[slot] if slot < len(columns) else None
            differs = expected is not None and column != UNKNOWN and column != _column_at(expected, slot)
            cells.append(names.cell(slot, column, differs, expected is not None and slot == named_slot))
        return Row(name, tuple(cells))

    rows = [row("before the step", list(range(context)))]
    rows += (
        [row("written by the forward", written_columns)]
        if any(column is not None for column in written_columns)
        else []
    )
    rows += [row("must be there after", expected_columns), row("is there after", held_columns, expected_columns)]
    parts = [(count, len(shown_slots), "slots")]
    title = f"KV slots of the target's cache{_layer_words(truth)}"
    grid = Grid(title, tuple(f"slot {slot}" for slot in shown_slots), tuple(rows), "", (), omission(parts), small=False)
    return SlotsPicture(grid, names.sentence(wrong_slots, expected_columns, held_columns))


def _column_at(columns: list[int | None], slot: int) -> int | None:
    return columns[slot] if slot < len(columns) else None


def _layer_words(truth: StepTruth) -> str:
    layer, kind = truth.finding.where.get("layer"), truth.finding.where.get("kind")
    return f", {kind}s of layer {layer}" if isinstance(layer, int) and kind in ("key", "value") else ""


def _expected_columns(truth: StepTruth, context: int, path: tuple[int, ...]) -> list[int | None]:
    """The column whose numbers each slot must hold: columns of the context, then accepted nodes."""
    num_accepted = len(truth.committed_tokens) - context
    if num_accepted < 0 or len(path) < num_accepted:
        return []
    return [*range(context), *(context + node for node in path[:num_accepted])]


def _written_columns(truth: StepTruth, tree: Tree, count: int) -> list[int | None]:
    """The node whose row the forward wrote to each slot, as a column."""
    lowered = truth.step.lowered if truth.step is not None else None
    if lowered is None or lowered.slot is None or truth.step is None:
        return []
    slots = np.asarray(lowered.slot).tolist()
    rows = range(len(slots)) if lowered.retrieve_index is None else np.asarray(lowered.retrieve_index).tolist()
    columns: list[int | None] = [None] * count
    for node, row in zip(range(len(tree)), rows, strict=False):
        if 0 <= row < len(slots) and 0 <= slots[row] < count:
            columns[slots[row]] = len(truth.step.context) + node
    return columns


def _held_columns(truth: StepTruth, after: Kv, expected_columns: list[int | None]) -> list[int | None]:
    """The column whose numbers each slot holds after the commit: the nearest one, if it is near and no other is."""
    where = truth.finding.where
    kinds = {"key": ("keys",), "value": ("values",)}.get(str(where.get("kind")), ("keys", "values"))
    named_layer = where.get("layer")
    if truth.inputs is None or any(getattr(after, kind).shape[1] != max(map(len, truth.inputs.keys)) for kind in kinds):
        return [UNKNOWN] * after.length
    layers = len(truth.inputs.keys)
    # The first layer's numbers depend on the token and its position alone, so that they tell nodes apart best.
    layer = named_layer if isinstance(named_layer, int) and 0 <= named_layer < layers else 0
    expected = np.concatenate([getattr(truth.inputs, kind)[layer] for kind in kinds], axis=-1)
    observed = np.concatenate(
        [_own_part(getattr(after, kind), getattr(truth.inputs, kind), layer) for kind in kinds], -1
    )
    first = after.first[layer] if after.first else 0
    tolerance = ALIKE[truth.case.dtype] * max(float(np.sqrt(np.mean(np.square(expected)))), 1e-30)
    return [
        UNKNOWN
        if slot < first
        else _nearest_column(observed[:, slot], expected, tolerance, _column_at(expected_columns, slot))
        for slot in range(after.length)
    ]


def _own_part(cells: Array, inputs: Layers, layer: int) -> Array:
    """The cells [heads, columns, width] of `layer` without the zeros behind a layer that is narrower than others."""
    is_of_these = cells.shape[-1] == max(columns.shape[-1] for columns in inputs)  # latent rows have another width
    part: Array = cells[layer, : len(inputs[layer])]
    return part[..., : inputs[layer].shape[-1]] if is_of_these else part


def _nearest_column(observed: Array, expected: Array, tolerance: float, expected_column: int | None) -> int:
    """The column of `expected` [heads, columns, numbers] whose numbers `observed` [heads, numbers] are, or NO_COLUMN.

    Columns with one token at one position have the same numbers: then the one that is `expected_column` there is named.
    """
    if observed.shape[-1] != expected.shape[-1]:
        return UNKNOWN
    distances = rms((expected - observed[:, None]).transpose(1, 0, 2).reshape(expected.shape[1], -1))
    nearest = int(distances.argmin())
    if expected_column is not None and distances[expected_column] <= min(
        tolerance, APART * distances[nearest] + tolerance / APART
    ):
        return expected_column
    return nearest if distances[nearest] <= tolerance else NO_COLUMN


@dataclass(frozen=True)
class _ColumnNames:
    """Words and cells for columns: those of the context by their tokens, those of the tree by their nodes."""

    tokens: tuple[int, ...]
    tree: Tree
    context: int

    def column_words(self, column: int | None) -> str:
        """A column in words."""
        if column is None:
            return "nothing"
        if column == UNKNOWN:
            return "not known"
        if column == NO_COLUMN:
            return "other numbers"
        return f"token {self.tokens[column]}" if column < self.context else f"node {column - self.context}"

    def cell(self, slot: int, column: int | None, wrong: bool, here: bool) -> Cell:
        """The cell of a slot."""
        state = "node"
        text = self.column_words(column)
        if column is None:
            state, text = "empty", "–"
        elif column in (UNKNOWN, NO_COLUMN):
            state, text = "empty", "?"
        elif column < self.context:
            state = "context"
        mark = ", which is wrong" if wrong else ""
        return Cell(state, text, f"slot {slot} holds {self.column_words(column)}{mark}", wrong, here)

    def sentence(
        self, wrong_slots: list[int], expected_columns: list[int | None], held_columns: list[int | None]
    ) -> str:
        """The first wrong slots in a sentence."""
        sentences = []
        for slot in wrong_slots[:3]:
            expected = self.column_words(expected_columns[slot])
            sentences.append(f"slot {slot} must hold {expected} and holds {self.column_words(held_columns[slot])}")
        more = f"; {plural(len(wrong_slots) - 3, 'further slot')} wrong" if len(wrong_slots) > 3 else ""
        text = "; ".join(sentences) + more
        return f"{text[:1].upper()}{text[1:]}." if sentences else ""
