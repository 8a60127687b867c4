"""Tables of the commands `list`, `doctor` and `bench`, at 80 columns."""

from typing import Any

from rich.table import Table

from specverify.reports.format import clean, number, plural
from specverify.reports.layout80 import plain_text


def rows_table(title: str, rows: list[dict[str, Any]]) -> str:
    """The rows of `list` or `doctor`: a name, its state, stage or device, and a sentence."""
    table = Table(title=title, title_justify="left", box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    for row in rows:
        state = row.get("state") or row.get("stage") or row.get("device") or ""
        sentence = row.get("detail") or row.get("sentence") or ""
        if "backends" in row and "tried" not in row:
            sentence += f" ({', '.join(row['backends']) or 'no backend'})"
        if row.get("unavailable"):
            sentence = f"NOT AVAILABLE: {row['unavailable']}"
        table.add_row(clean(str(row["name"])), clean(str(state)), clean(str(sentence)))
    return plain_text(table)


def figures_table(figures: dict[str, Any]) -> str:
    """The figures of `bench`: names and values."""
    table = Table(title="bench", title_justify="left", box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in figures.items():
        table.add_row(name, number(value) if isinstance(value, float) else clean(str(value)))
    return plain_text(table)


def kv_table(figures: dict[str, Any]) -> str:
    """The table of `bench kv`: times at the shortest prefix, and the factor of each longer prefix."""
    rows = figures["rows"]
    prefixes = sorted({row["prefix"] for row in rows})
    table = Table(title=f"bench kv: µs at {prefixes[0]} committed columns, then times as long at more",
                  title_justify="left", box=None, padding=(0, 1, 0, 0))  # fmt: skip
    for name in ("layout", "page", "kept"):
        table.add_column(name, justify="left" if name == "layout" else "right", no_wrap=True)
    for kind in ("verify", "commit"):
        table.add_column(kind, justify="right", no_wrap=True)
        for prefix in prefixes[1:]:
            table.add_column(f"×{prefix}", justify="right", no_wrap=True)
    lines: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
    for row in rows:
        # The prefixes of one layout, page size and accepted length stand on one line.
        lines.setdefault((row["layout"], row["page_size"], row["accepted"]), []).append(row)
    for (layout, page, accepted), line in lines.items():
        cells = []
        for kind in ("verify", "commit"):
            cells.append(f"{line[0][f'{kind}_us']:.0f}")
            cells += [f"{row[f'{kind}_ratio']:.1f}" for row in line[1:]]
        table.add_row(layout, str(page or ""), str(accepted), *cells)
    return plain_text(table)


def attention_table(figures: dict[str, Any]) -> str:
    """The tables of `bench attention`: each path as a multiple of SDPA's time, and of one reading of the KV cache."""
    title = f"bench attention on {clean(figures['device'])}: {figures['dtype']}, {figures['heads']} heads on "
    title += f"{figures['kv_heads']} KV of {figures['dim']}, {plural(figures['threads'], 'thread')}"
    names = [name for name in dict.fromkeys(row["path"] for row in figures["rows"]) if name != "read"]
    pages = [title]
    for words, field, shown_names in (
        ("times of SDPA under the dense mask", "ratio", [name for name in names if name != "sdpa"]),
        ("times of reading keys and values once", "over_read", names),
    ):
        base = "sdpa" if field == "ratio" else "read"
        table = Table(title=words, title_justify="left", box=None, padding=(0, 2, 0, 0))
        for name in ("batch", "prefix", "nodes", f"{base} µs", *shown_names):
            table.add_column(name, justify="right", no_wrap=True)
        lines: dict[tuple[int, int, int], dict[str, dict[str, Any]]] = {}
        for row in figures["rows"]:
            lines.setdefault((row["batch"], row["prefix"], row["nodes"]), {})[row["path"]] = row
        for place, line in lines.items():
            cells = [f"{line[name][field]:.2f}" for name in shown_names]
            table.add_row(*map(str, place), f"{line[base]['us']:.0f}", *cells)
        pages.append(plain_text(table).rstrip("\n"))
    pages += [f"{name}: not measured\n  {clean(reason)}" for name, reason in figures["absent"].items()]
    return "\n".join([*pages, ""])
