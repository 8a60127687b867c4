"""KV slots of a step: before it, as they must be after it, as they were."""

from dataclasses import dataclass

import numpy as np

from properties.tolerance.closeness import rms
from reference.trace import Array, Kv
from reference.tree import Tree
from reports.format import plural
from reports.html.pictures.grid import Cell, Grid, Row, omission, shown_indices
from reports.html.pictures.step_truth import StepTruth

ALIKE = {"float64": 1e-6, "float32": 1e-3, "bfloat16": 0.1, "float16": 0.02}
"""The largest distance, as a share of the size of all columns, at which a slot is said to hold a column's numbers."""

APART = 4.0
"""The wanted column may be so many times as far off as the nearest one, and is still the one that is named."""

MOST = 14
"""Most slots that are shown."""

UNKNOWN, OTHER = -1, -2
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
    wanted = _expected_columns(truth, context, path)
    held = _held_columns(truth, record.after, wanted) if record.after is not None else []
    if not wanted or not held:
        return None
    count = max(len(wanted), len(held))
    held += [None] * (count - len(held))
    here = truth.finding.where.get("slot", truth.finding.where.get("position"))
    wrong = [at for at in range(count) if held[at] not in (_column_at(wanted, at), UNKNOWN)]
    shown = shown_indices(count, [*([here] if isinstance(here, int) else []), *wrong], MOST)
    written = _written_columns(truth, tree, len(held))
    names = _ColumnNames(truth.committed_tokens, tree, context)

    def row(name: str, columns: list[int | None], against: list[int | None] | None = None) -> Row:
        cells = []
        for at in shown:
            column = columns[at] if at < len(columns) else None
            differs = against is not None and column != UNKNOWN and column != _column_at(against, at)
            cells.append(names.cell(at, column, differs, against is not None and at == here))
        return Row(name, tuple(cells))

    rows = [row("before the step", list(range(context)))]
    rows += [row("written by the forward", written)] if any(one is not None for one in written) else []
    rows += [row("must be there after", wanted), row("is there after", held, wanted)]
    parts = [(count, len(shown), "slots")]
    title = f"KV slots of the target's cache{_layer_words(truth)}"
    grid = Grid(title, tuple(f"slot {at}" for at in shown), tuple(rows), "", (), omission(parts), small=False)
    return SlotsPicture(grid, names.sentence(wrong, wanted, held))


def _column_at(columns: list[int | None], at: int) -> int | None:
    return columns[at] if at < len(columns) else None


def _layer_words(truth: StepTruth) -> str:
    layer, kind = truth.finding.where.get("layer"), truth.finding.where.get("kind")
    return f", {kind}s of layer {layer}" if isinstance(layer, int) and kind in ("key", "value") else ""


def _expected_columns(truth: StepTruth, context: int, path: tuple[int, ...]) -> list[int | None]:
    """The column whose numbers each slot must hold: columns of the context, then accepted nodes."""
    taken = len(truth.committed_tokens) - context
    if taken < 0 or len(path) < taken:
        return []
    return [*range(context), *(context + node for node in path[:taken])]


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


def _held_columns(truth: StepTruth, after: Kv, wanted: list[int | None]) -> list[int | None]:
    """The column whose numbers each slot holds after the commit: the nearest one, if it is near and no other is."""
    where = truth.finding.where
    kinds = {"key": ("keys",), "value": ("values",)}.get(str(where.get("kind")), ("keys", "values"))
    named = where.get("layer")
    if truth.inputs is None or any(getattr(after, kind).shape[1] != truth.inputs.keys.shape[1] for kind in kinds):
        return [UNKNOWN] * after.length
    layers = len(truth.inputs.keys)
    # The first layer's numbers depend on the token and its position alone, so that they tell nodes apart best.
    layer = named if isinstance(named, int) and 0 <= named < layers else 0
    seen = np.concatenate([getattr(after, kind)[layer] for kind in kinds], axis=-1)
    true = np.concatenate([getattr(truth.inputs, kind)[layer] for kind in kinds], axis=-1)
    first = after.first[layer] if after.first else 0
    alike = ALIKE[truth.case.dtype] * max(float(np.sqrt(np.mean(np.square(true)))), 1e-30)
    return [
        UNKNOWN if at < first else _nearest_column(seen[:, at], true, alike, _column_at(wanted, at))
        for at in range(after.length)
    ]


def _nearest_column(seen: Array, true: Array, alike: float, wanted: int | None) -> int:
    """The column of `true` [heads, columns, numbers] whose numbers `seen` [heads, numbers] are, or OTHER.

    Columns with one token at one position have the same numbers: then the one that is `wanted` there is named.
    """
    if seen.shape[-1] != true.shape[-1]:
        return UNKNOWN
    apart = rms((true - seen[:, None]).transpose(1, 0, 2).reshape(true.shape[1], -1))
    nearest = int(apart.argmin())
    if wanted is not None and apart[wanted] <= min(alike, APART * apart[nearest] + alike / APART):
        return wanted
    return nearest if apart[nearest] <= alike else OTHER


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
        if column == OTHER:
            return "other numbers"
        return f"token {self.tokens[column]}" if column < self.context else f"node {column - self.context}"

    def cell(self, slot: int, column: int | None, wrong: bool, here: bool) -> Cell:
        """The cell of a slot."""
        text = "–" if column is None else "?" if column in (UNKNOWN, OTHER) else self.column_words(column)
        state = "empty" if column is None or column < 0 else "context" if column < self.context else "node"
        mark = ", which is wrong" if wrong else ""
        return Cell(state, text, f"slot {slot} holds {self.column_words(column)}{mark}", wrong, here)

    def sentence(self, wrong: list[int], wanted: list[int | None], held: list[int | None]) -> str:
        """The first wrong slots in a sentence."""
        told = [
            f"slot {at} must hold {self.column_words(wanted[at])} and holds {self.column_words(held[at])}"
            for at in wrong[:3]
        ]
        more = f"; {plural(len(wrong) - 3, 'further slot')} wrong" if len(wrong) > 3 else ""
        text = "; ".join(told) + more
        return f"{text[:1].upper()}{text[1:]}." if told else ""
