"""Heat maps of a step: the distance of numbers from the oracle's, by place."""

from dataclasses import dataclass

import numpy as np

from properties.tolerance.bounds import UNIT
from properties.tolerance.closeness import rms
from reference.trace import Array, Kv, Stage
from reports.format import number
from reports.html.pictures.grid import Cell, Grid, Row, omission, shown_indices
from reports.html.pictures.step_truth import StepTruth

SHADES = (1.0, 10.0, 1e3, 1e6)
"""Factors of what is allowed from which on a cell has the next shade."""

ROUNDING = 64.0
"""Without a threshold of the run: so many roundings of the working dtype stay without a shade."""


@dataclass(frozen=True)
class HeatMap:
    """A quantity.

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
    step, true = truth.step, truth.oracle_step
    if step is None or true is None:
        return []
    where = truth.finding.where
    maps = []
    if step.attended is not None and true.attended is not None:
        nodes = [f"node {at}" for at in range(true.attended.output.shape[2])]
        place = _named_place(where, "layer", "head", "node") if truth.finding.stage is Stage.ATTENDED else None
        name = "output of attention, by layer, head and node"
        maps.append(_layer_map(truth, Stage.ATTENDED, name, step.attended.output, true.attended.output, nodes, place))
    if step.scored is not None and true.scored is not None:
        maps.append(_logits_map(truth, step.scored.logits, true.scored.logits))
    after = step.committed.after if step.committed is not None else None
    if after is not None and truth.after is not None:
        maps += [_cache_map(truth, kind, after, truth.after) for kind in ("key", "value")]
    return [one for one in maps if one is not None]


def _named_place(where: dict[str, int | str], *names: str) -> tuple[int, ...] | None:
    """The coordinates `names` of a finding, if it has all of them."""
    found = tuple(one for one in map(where.get, names) if isinstance(one, int))
    return found if len(found) == len(names) else None


def _cache_map(truth: StepTruth, kind: str, after: Kv, true: Kv) -> HeatMap | None:
    where = truth.finding.where
    mine = truth.finding.stage is Stage.COMMITTED and where.get("kind") == kind and where.get("cache") != "draft"
    place = (
        (_named_place(where, "layer", "head", "slot") or _named_place(where, "layer", "head", "position"))
        if mine
        else None
    )
    slots = [f"slot {at}" for at in range(true.length)]
    name = f"{kind}s of the cache after the commit, by layer, head and slot"
    seen, wanted = (getattr(kv, f"{kind}s") for kv in (after, true))
    if after.first:  # columns that a layer has let go are not compared
        seen = seen.copy()
        for layer, first in enumerate(after.first):
            seen[layer, :, :first] = wanted[layer, :, :first] if seen.shape == wanted.shape else seen[layer, :, :first]
    return _layer_map(truth, Stage.COMMITTED, name, seen, wanted, slots, place)


def _layer_map(
    truth: StepTruth,
    stage: Stage,
    name: str,
    seen: Array,
    true: Array,
    columns: list[str],
    place: tuple[int, ...] | None,
) -> HeatMap | None:
    """The heat map of arrays [layers, heads, columns, numbers], a row for each layer and head."""
    if seen.shape != true.shape or not true.size:
        return None
    apart = rms(seen - true)
    heads = apart.shape[1]
    names = [f"layer {layer}, head {head}" for layer in range(len(apart)) for head in range(heads)]
    at = None
    if place is not None and all(0 <= one < size for one, size in zip(place, apart.shape, strict=True)):
        at = (place[0] * heads + place[1], place[2])
    flat = apart.reshape(len(names), -1)
    return _map(truth, stage, f"Distance from the reference: {name}", flat, names, columns, at, true)


def _logits_map(truth: StepTruth, seen: Array, true: Array) -> HeatMap | None:
    if seen.shape != true.shape or not true.size:
        return None
    where = truth.finding.where
    place = _named_place(where, "node", "token") if truth.finding.stage is Stage.SCORED else None
    inside = place is not None and place[0] < seen.shape[0] and place[1] < seen.shape[1]
    with np.errstate(invalid="ignore"):
        apart = np.nan_to_num(np.abs(seen.astype(np.float64) - true), nan=np.inf)
    names = [f"node {at}" for at in range(len(apart))]
    tokens = [f"token {at}" for at in range(apart.shape[1])]
    at = (place[0], place[1]) if inside and place is not None else None
    return _map(
        truth, Stage.SCORED, "Distance from the reference: logits, by node and token", apart, names, tokens, at, true
    )


def _map(
    truth: StepTruth,
    stage: Stage,
    title: str,
    apart: Array,
    names: list[str],
    columns: list[str],
    at: tuple[int, int] | None,
    true: Array,
) -> HeatMap:
    allowed, legend = _allowed_distance(truth, apart, at, true)
    ratio = np.divide(apart, allowed, out=np.where(apart > 0, np.inf, 0.0), where=allowed > 0)
    worst = np.unravel_index(int(np.argmax(ratio)), ratio.shape)
    rows = shown_indices(len(names), [*([at[0]] if at else []), int(worst[0])])
    shown = shown_indices(len(columns), [*([at[1]] if at else []), int(worst[1])], 12)

    def cell(row: int, column: int) -> Cell:
        shade = int(sum(ratio[row, column] > bound for bound in SHADES))
        value = number(float(apart[row, column]))
        words = f"{names[row]}, {columns[column]}: off by {value}"
        return Cell(f"h{shade}", value, words, shade > 0, (row, column) == at)

    parts = [(len(names), len(rows), "rows"), (len(columns), len(shown), "columns")]
    grid = Grid(
        title,
        tuple(columns[column] for column in shown),
        tuple(Row(names[row], tuple(cell(row, column) for column in shown)) for row in rows),
        left_out=omission(parts),
        small=False,
    )
    return HeatMap(stage.word, grid, legend, bool((ratio > SHADES[0]).any()))


def _allowed_distance(truth: StepTruth, apart: Array, at: tuple[int, int] | None, true: Array) -> tuple[float, str]:
    """The distance up to which a cell has no shade, and what the shades mean."""
    measure = truth.finding.measure
    if (
        at is not None
        and measure
        and np.isfinite(measure)
        and np.isfinite(apart[at])
        and truth.finding.stage is not Stage.SCORED
    ):
        return float(apart[at] / measure), (
            "The darker, the further off: more than 1, 10, 1000 and a million times what is allowed at the marked cell."
        )
    size = float(np.sqrt(np.nanmean(np.square(true.astype(np.float64)))))
    return ROUNDING * UNIT[truth.case.dtype] * max(size, 1e-30), (
        f"The darker, the further off: more than 1, 10, 1000 and a million times {ROUNDING:g} roundings of "
        f"{truth.case.dtype}."
    )
