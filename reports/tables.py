"""Tables of the commands that list things: names, states, sentences, figures, at 80 columns."""

from typing import Any

from rich.table import Table

from reports.paper import printed
from reports.values import clean, number


def rows_table(title: str, rows: list[dict[str, Any]]) -> str:
    """Rows of `list` or `doctor`: the name, what states and places it, and its sentence."""
    table = Table(title=title, title_justify="left", box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    for row in rows:
        state = row.get("state") or row.get("stage") or row.get("device") or ""
        sentence = row.get("detail") or row.get("sentence") or ""
        if row.get("unavailable"):
            sentence = f"NOT AVAILABLE: {row['unavailable']}"
        table.add_row(clean(str(row["name"])), clean(str(state)), clean(str(sentence)))
    return printed(table)


def figures_table(figures: dict[str, Any]) -> str:
    """Figures of `bench`: name and value."""
    table = Table(title="bench", title_justify="left", box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in figures.items():
        table.add_row(name, number(value) if isinstance(value, float) else clean(str(value)))
    return printed(table)
