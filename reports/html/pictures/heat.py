"""Heat maps of a step: the distance of numbers from the oracle's, by place."""

from dataclasses import dataclass

import numpy as np

from specverify.properties.tolerance.bounds import UNIT
from specverify.properties.tolerance.closeness import rms
from specverify.reference.trace import Array, Kv, Stage
from specverify.reports.format import number
from specverify.reports.html.pictures.grid import Cell, Grid, Row, omission, shown_indices
from specverify.reports.html.pictures.step_truth import StepTruth

SHADES = (1.0, 10.0, 1e3, 1e6)
"""Factors of what is allowed from which on a cell has the next shade."""

ROUNDING = 64.0
"""Without a threshold of the run: so many roundings of the working dtype stay without a shade."""


@dataclass(frozen=True)
class HeatMap:
    """The heat map of a quantity.

    Attributes:
        stage: The stage that shows it.
        grid: The distances.
        legend: What the shades mean.
        off: Whether any cell has a shade.
    """

    stage: str
    grid: Grid
    legend: str
    off: bool


def heat_maps(truth: StepTruth) -> list[HeatMap]:
    """A heat map for each quantity of the step that both the trace and the oracle show, in the order of the stages."""
    step, expected = truth.step, truth.oracle_step
    if step is None or expected is None:
        return []
    where = truth.finding.where
    maps = []
    if step.attended is not None and expected.attended is not None:
        nodes = [f"node {node}" for node in range(expected.attended.output.shape[2])]
        place = _named_place(where, "layer", "head", "node") if truth.finding.stage is Stage.ATTENDED else None
        name = "output of attention, by layer, head and node"
        maps.append(
            _layer_map(truth, Stage.ATTENDED, name, step.attended.output, expected.attended.output, nodes, place)
        )
    if step.scored is not None and expected.scored is not None:
        maps.append(_logits_map(truth, step.scored.logits, expected.scored.logits))
    after = step.committed.after if step.committed is not None else None
    if after is not None and truth.after is not None:
        maps += [_cache_map(truth, kind, after, truth.after) for kind in ("key", "value")]
    return [heat_map for heat_map in maps if heat_map is not None]


def _named_place(where: dict[str, int | str], *names: str) -> tuple[int, ...] | None:
    """The coordinates `names` of a finding, if it has all of them."""
    coordinates = tuple(value for value in map(where.get, names) if isinstance(value, int))
    return coordinates if len(coordinates) == len(names) else None


def _cache_map(truth: StepTruth, kind: str, observed_kv: Kv, expected_kv: Kv) -> HeatMap | None:
    where = truth.finding.where
    is_named = truth.finding.stage is Stage.COMMITTED and where.get("kind") == kind and where.get("cache") != "draft"
    place = None
    if is_named:
        place = _named_place(where, "layer", "head", "slot") or _named_place(where, "layer", "head", "position")
    slots = [f"slot {slot}" for slot in range(expected_kv.length)]
    name = f"{kind}s of the cache after the commit, by layer, head and slot"
    observed = getattr(observed_kv, f"{kind}s")
    expected = getattr(expected_kv, f"{kind}s")
    if observed_kv.first and observed.shape == expected.shape:  # columns that a layer has let go are not compared
        observed = observed.copy()
        for layer, first in enumerate(observed_kv.first):
            observed[layer, :, :first] = expected[layer, :, :first]
    return _layer_map(truth, Stage.COMMITTED, name, observed, expected, slots, place)


def _layer_map(
    truth: StepTruth,
    stage: Stage,
    name: str,
    observed: Array,
    expected: Array,
    columns: list[str],
    named_place: tuple[int, ...] | None,
) -> HeatMap | None:
    """The heat map of arrays [layers, heads, columns, numbers], a row for each layer and head."""
    if observed.shape != expected.shape or not expected.size:
        return None
    distances = rms(observed - expected)
    heads = distances.shape[1]
    names = [f"layer {layer}, head {head}" for layer in range(len(distances)) for head in range(heads)]
    named_cell = None
    if named_place is not None and all(
        0 <= index < size for index, size in zip(named_place, distances.shape, strict=True)
    ):
        named_cell = (named_place[0] * heads + named_place[1], named_place[2])
    flat = distances.reshape(len(names), -1)
    return _map(truth, stage, f"Distance from the reference: {name}", flat, names, columns, named_cell, expected)


def _logits_map(truth: StepTruth, observed: Array, expected: Array) -> HeatMap | None:
    if observed.shape != expected.shape or not expected.size:
        return None
    where = truth.finding.where
    place = _named_place(where, "node", "token") if truth.finding.stage is Stage.SCORED else None
    is_inside = place is not None and place[0] < observed.shape[0] and place[1] < observed.shape[1]
    with np.errstate(invalid="ignore"):
        distances = np.nan_to_num(np.abs(observed.astype(np.float64) - expected), nan=np.inf)
    names = [f"node {node}" for node in range(len(distances))]
    tokens = [f"token {token}" for token in range(distances.shape[1])]
    named_cell = (place[0], place[1]) if is_inside and place is not None else None
    return _map(
        truth,
        Stage.SCORED,
        "Distance from the reference: logits, by node and token",
        distances,
        names,
        tokens,
        named_cell,
        expected,
    )


def _map(
    truth: StepTruth,
    stage: Stage,
    title: str,
    distances: Array,
    names: list[str],
    columns: list[str],
    named_cell: tuple[int, int] | None,
    expected: Array,
) -> HeatMap:
    allowed, legend = _allowed_distance(truth, distances, named_cell, expected)
    ratio = np.divide(distances, allowed, out=np.where(distances > 0, np.inf, 0.0), where=allowed > 0)
    worst = np.unravel_index(int(np.argmax(ratio)), ratio.shape)
    shown_rows = shown_indices(len(names), [*([named_cell[0]] if named_cell else []), int(worst[0])])
    shown_columns = shown_indices(len(columns), [*([named_cell[1]] if named_cell else []), int(worst[1])], 12)

    def cell(row: int, column: int) -> Cell:
        shade = int(sum(ratio[row, column] > bound for bound in SHADES))
        value = number(float(distances[row, column]))
        words = f"{names[row]}, {columns[column]}: off by {value}"
        return Cell(f"h{shade}", value, words, shade > 0, (row, column) == named_cell)

    parts = [(len(names), len(shown_rows), "rows"), (len(columns), len(shown_columns), "columns")]
    grid = Grid(
        title,
        tuple(columns[column] for column in shown_columns),
        tuple(Row(names[row], tuple(cell(row, column) for column in shown_columns)) for row in shown_rows),
        left_out=omission(parts),
        small=False,
    )
    return HeatMap(stage.word, grid, legend, bool((ratio > SHADES[0]).any()))


def _allowed_distance(
    truth: StepTruth, distances: Array, named_cell: tuple[int, int] | None, expected: Array
) -> tuple[float, str]:
    """The distance up to which a cell has no shade, and what the shades mean."""
    measure = truth.finding.measure
    if (
        named_cell is not None
        and measure
        and np.isfinite(measure)
        and np.isfinite(distances[named_cell])
        and truth.finding.stage is not Stage.SCORED
    ):
        return float(distances[named_cell] / measure), (
            "The darker, the further off: more than 1, 10, 1000 and a million times what is allowed at the marked cell."
        )
    size = float(np.sqrt(np.nanmean(np.square(expected.astype(np.float64)))))
    return ROUNDING * UNIT[truth.case.dtype] * max(size, 1e-30), (
        f"The darker, the further off: more than 1, 10, 1000 and a million times {ROUNDING:g} roundings of "
        f"{truth.case.dtype}."
    )
