"""Tables of `bench decode` by batch, tokens of the prompt, draft length, weights and vocabulary."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from specverify.reports.format import clean
from specverify.reports.layout80 import plain_text

TIMES = ("ttft_ms", "tpot_ms")
"""The times of a cell, in the order of the columns."""

SERIES = {
    "chains": ("length", "by draft length: chains of so many tokens"),
    "weights": (
        "weights",
        "by weights of the draft, which run in the working dtype: times show no narrower products",
    ),
    "vocabularies": ("vocabulary", "by tokens that the draft can name"),
}
"""For each series of `specverify.bench.budgets.series` its property and its title."""


def with_error(value: float | None, error: float | None) -> str:
    """A value with its standard error; a dash where it was not measured."""
    if value is None:
        return "-"
    return f"{value:.2f}" if error is None else f"{value:.2f}±{error:.2f}"


def draft_tables(figures: Mapping[str, Any]) -> list[str]:
    """Ways by draft length, by weights and by vocabulary, where several were timed."""
    return [_series(key, figures[key]) for key in SERIES if figures.get(key)]


def _series(key: str, rows: Sequence[Mapping[str, Any]]) -> str:
    name, title = SERIES[key]
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("way", overflow="fold")
    for column in (name, "per call", "accepted", "×", "drafting ms", "draft MiB"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        values = [row["accepted"], row["drafting_ms"], row["draft_mb"]]
        accepted, drafting, size = ("-" if value is None else f"{value:.3g}" for value in values)
        per_call = with_error(row["tokens_per_call"], row["tokens_per_call_error"])
        speed_up = with_error(row["speed_up"], row["speed_up_error"])
        # The way of a vocabulary that was not reduced names all tokens.
        value = "all" if row[name] is None else str(row[name])
        table.add_row(clean(row["way"]), value, per_call, accepted, speed_up, drafting, size)
    return plain_text(table)


def cell_tables(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Ways by batch and tokens of the prompt, and their speed-ups as grids; nothing where neither was asked for."""
    if not rows:
        return []
    return [_cells(rows), *_speed_up_grids(rows)]


def _cells(rows: Sequence[Mapping[str, Any]]) -> str:
    title = "by batch and tokens of the prompt; tok/s and × are those of the whole batch"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("way", overflow="fold")
    for column in ("batch", "tokens", "tok/s", "×", "per call", "accepted", "TTFT ms", "TPOT ms"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        accepted = row["accepted"]
        table.add_row(
            clean(row["way"]),
            str(row["batch"] or "-"),
            str(row["context"] or "-"),
            f"{row['batch_tokens_per_s']:.1f}",
            with_error(row["batch_speed_up"], row["batch_speed_up_error"]),
            with_error(row["tokens_per_call"], row["tokens_per_call_error"]),
            "-" if accepted is None else f"{accepted['mean']:.2f}",
            *("-" if row[name] is None else f"{row[name]:.1f}" for name in TIMES),
        )
    return plain_text(table)


def _speed_up_grids(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Speed-ups by batch and context, a grid for each way, and by way and batch, a grid for each context."""
    drafted_rows = [row for row in rows if row["accepted"] is not None]
    ways = list(dict.fromkeys(row["way"] for row in drafted_rows))
    batches = sorted({row["batch"] for row in drafted_rows})
    contexts = list(dict.fromkeys(row["context"] for row in drafted_rows))
    row_by_place = {(row["way"], row["batch"], row["context"]): row for row in drafted_rows}
    grids = []
    if len(batches) > 1 and len(contexts) > 1:
        for way in ways:
            cells = [[row_by_place.get((way, batch, context)) for context in contexts] for batch in batches]
            columns = [f"{context} tokens" for context in contexts]
            grids.append(
                _grid(f"× of {clean(way)} by batch and tokens of the prompt", "batch", batches, columns, cells)
            )
    if len(batches) > 1 and len(ways) > 1:
        for context in contexts:
            cells = [[row_by_place.get((way, batch, context)) for batch in batches] for way in ways]
            where = "" if context is None else f", after {context} tokens"
            columns = [f"batch {batch}" for batch in batches]
            grids.append(_grid(f"× by draft and batch{where}", "way", [clean(way) for way in ways], columns, cells))
    return grids


def _grid(
    title: str,
    name: str,
    keys: Sequence[object],
    columns: Sequence[str],
    cells: Sequence[Sequence[Mapping[str, Any] | None]],
) -> str:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column(name, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for key, row_cells in zip(keys, cells, strict=True):
        texts = [
            "-" if cell is None else with_error(cell["batch_speed_up"], cell["batch_speed_up_error"])
            for cell in row_cells
        ]
        table.add_row(str(key), *texts)
    return plain_text(table)
