"""The HTML pages of `train` and `bench heads`.

They show the acceptance over the training as plots, and the figures as tables.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from specverify.reports.format import cut
from specverify.reports.html.document import render_page
from specverify.reports.html.pictures.plot import SERIES, Plot, plot
from specverify.reports.html.selftest import tables_of

TRAINING = "A draft head as it learned: tokens that a call of the target emits, on prompts that were held out."
GRID = "Draft heads of several shapes, trained alike: tokens that a call of the target emits, on held-out prompts."

TREES = {"chain": "a chain of 4", "tree": "a tree of 24"}
"""The drafted trees of a curve, each with its words."""


def training_page(figures: Mapping[str, Any], version: str) -> bytes:
    """The page of `train`, from the figures that `--json` writes."""
    curves = {words: points(figures["curve"], tree) for tree, words in TREES.items()}
    losses = {"loss": [(line["step"], line["loss"]) for line in figures["curve"] if line["loss"] is not None]}
    charts = [
        plot("tokens per call over the training", "step", "tokens per call", curves),
        plot("loss over the training", "step", "loss", losses),
    ]
    return _page("Training", TRAINING, figures, charts, version)


def heads_page(figures: Mapping[str, Any], version: str) -> bytes:
    """The page of `bench heads`, from the figures that `--json` writes."""
    charts = []
    for tree, words in TREES.items():
        for rows in _groups(figures["heads"]):
            curves = {cut(row["head"], 40): points(row["curve"], tree) for row in rows}
            charts.append(plot(f"{words}: tokens per call over the training", "step", "tokens per call", curves))
    table = [{name: value for name, value in row.items() if name != "curve"} for row in figures["heads"]]
    return _page("Bench: heads", GRID, {**figures, "heads": table}, charts, version)


def points(curve: Sequence[Mapping[str, Any]], tree: str) -> list[tuple[float, float]]:
    """The points of a curve: step, and tokens per call of the drafted tree `tree`."""
    return [(line["step"], 1 + line[tree]) for line in curve]


def _groups(rows: Sequence[Any]) -> list[Sequence[Any]]:
    """`rows` in groups of as many as one plot can tell apart."""
    return [rows[first : first + SERIES] for first in range(0, len(rows), SERIES)]


def _page(title: str, what: str, figures: Mapping[str, Any], charts: list[Plot | None], version: str) -> bytes:
    single, tables = tables_of(figures)
    facts = {
        "title": title,
        "what": what,
        "lines": [],
        "version": version,
        "bars": [],
        "charts": [chart for chart in charts if chart is not None],
        "stages": (),
        "names": list,
        "single": single,
        "tables": tables,
    }
    return render_page("bench.html.j2", facts)
