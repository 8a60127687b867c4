"""The HTML page of a record: what ran, its plots and tables, and its turns."""

from collections.abc import Mapping
from typing import Any

from specverify.reports.html.bench import bench_page
from specverify.reports.html.selftest import figures_page

COLUMNS = ("prompt", "place", "repeat", "way", "tokens", "seconds", "accepted", "outcome")
"""The fields of a turn that the page shows; lists as their lengths and sums."""


def record_page(folder: str, figures: Mapping[str, Any], version: str) -> bytes:
    """The page of a record, from the figures that `trace show --json` writes.

    A record of a bench with finished turns has the plots of the bench; any other has its figures alone.
    """
    manifest = figures["manifest"]
    run_fields = {
        "record": folder,
        **{f"ran {name}": value for name, value in manifest.items() if name not in ("facts", "prompts", "ways")},
        "failure dumps": figures["failures"],
        "unfinished lines": figures["torn"],
    }
    turns = [_turn(turn) for turn in figures["turns"]]
    if figures.get("ways"):
        bench_figures = {name: value for name, value in figures.items() if name not in ("manifest", "failures", "torn")}
        return bench_page("decode", {**run_fields, **bench_figures, "turns": turns}, version)
    sentence = "A run as its record holds it: what ran, and each turn that ended."
    return figures_page(f"Record of {manifest['kind']}", sentence, {**run_fields, "turns": turns}, version)


def _turn(turn: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the table of turns: tokens as their number, accepted tokens as their sum."""
    row = {name: turn[name] for name in COLUMNS if name in turn}
    row["tokens"] = len(turn["tokens"])
    if "accepted" in row:
        row["accepted"] = sum(turn["accepted"])
    return row
