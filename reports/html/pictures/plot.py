"""Plots: lines through points on two axes, and bars of parts of a whole."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specverify.reports.format import number

WIDTH, HEIGHT = 300, 180
"""The area between the axes, in pixels."""

ORIGIN_X, TOP = 52, 12
"""The place of that area in the picture."""

BOTTOM = TOP + HEIGHT
"""The height of the axis on which the points with y = 0 lie."""

SERIES = 6
"""Most series with a style of their own; further ones begin again."""

MARKS = 4
"""About as many marks stand on each axis."""


@dataclass(frozen=True)
class Line:
    """A series of a plot: its name and its points.

    Attributes:
        name: Its name in the legend.
        style: The number of its style.
        path: The path of its line, in SVG's words.
        points: x, y and the words of each point.
    """

    name: str
    style: int
    path: str
    points: tuple[tuple[float, float, str], ...]


@dataclass(frozen=True)
class Plot:
    """A plot with its axes.

    Attributes:
        title: What is plotted.
        across, up: What the axes mean.
        lines: The series.
        marks_x, marks_y: Place and text of each mark.
        level: The height of the line at which a way is as fast as the target alone; None for none.
        words: All points in words, for those who do not see the picture.
    """

    title: str
    across: str
    up: str
    lines: tuple[Line, ...]
    marks_x: tuple[tuple[float, str], ...]
    marks_y: tuple[tuple[float, str], ...]
    level: float | None
    words: str
    width: int = ORIGIN_X + WIDTH + 16
    height: int = BOTTOM + 40
    left: int = ORIGIN_X
    bottom: int = BOTTOM


def plot(
    title: str, across: str, up: str, series: Mapping[str, Sequence[tuple[float, float]]], level: float | None = None
) -> Plot | None:
    """The plot of `series`, each a list of points (x, y); None where no series has a point.

    The axis upwards begins at 0, the other one at the smallest x.
    """
    series = {name: sorted(points) for name, points in series.items() if points}
    if not series:
        return None
    xs = [x for points in series.values() for x, _ in points]
    ys = [y for points in series.values() for _, y in points] + ([level] if level is not None else [])
    low, high, top = min(xs), max(xs), max(max(ys), 1e-12) * 1.05

    def at_x(x: float) -> float:
        return round(ORIGIN_X + WIDTH * ((x - low) / (high - low) if high > low else 0.5), 1)

    def at_y(y: float) -> float:
        return round(TOP + HEIGHT * (1 - max(0.0, y) / top), 1)

    lines = []
    for place, (name, points) in enumerate(series.items()):
        drawn_points = tuple((at_x(x), at_y(y), f"{name}: {number(y)} at {number(x)}") for x, y in points)
        path = "M" + "L".join(f"{x} {y}" for x, y, _ in drawn_points)
        lines.append(Line(name, place % SERIES, path, drawn_points))
    words = "; ".join(words for line in lines for *_, words in line.points)
    return Plot(
        title,
        across,
        up,
        tuple(lines),
        tuple((at_x(x), number(x)) for x in _thin_out(sorted(set(xs)))),
        tuple((at_y(y), number(y)) for y in _round_marks(top)),
        None if level is None else at_y(level),
        words,
    )


def _thin_out(values: list[float]) -> list[float]:
    step = max(1, math.ceil(len(values) / (MARKS + 2)))
    return values[::step]


def _round_marks(top: float) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, from 0 up to `top`."""
    power = 10.0 ** math.floor(math.log10(top / MARKS))
    step = next((factor * power for factor in (1, 2, 5) if factor * power * MARKS >= top), 10 * power)
    return [step * count for count in range(int(top / step) + 1)]


@dataclass(frozen=True)
class Part:
    """A part of a whole: its name, the number of its style, its place and length in pixels, its words."""

    name: str
    style: int
    x: float
    width: float
    words: str


@dataclass(frozen=True)
class StackedBar:
    """A bar of parts, with its label and its place."""

    label: str
    y: int
    parts: tuple[Part, ...]


def stacked_bars(rows: Mapping[str, Mapping[str, float]]) -> tuple[StackedBar, ...]:
    """Bars of shares that sum to 1 at most; the style of a part is that of its name."""
    names = list(dict.fromkeys(name for parts in rows.values() for name in parts))
    bars = []
    for number_, (label, parts) in enumerate(rows.items()):
        x, drawn_parts = 0.0, list[Part]()
        for name in (name for name in names if name in parts):
            width = round(WIDTH * parts[name], 1)
            drawn_parts.append(Part(name, names.index(name), round(x, 1), width, f"{name}: {100 * parts[name]:.1f} %"))
            x += width
        bars.append(StackedBar(label, 38 * number_, tuple(drawn_parts)))
    return tuple(bars)
