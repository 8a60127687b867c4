"""The page of `bench growth`: grids of times, and what one unit more costs."""

from typing import Any

from rich.table import Table

from specverify.reports.format import clean, plural
from specverify.reports.layout80 import plain_text


def growth_page(figures: dict[str, Any]) -> str:
    """The figures of `specverify.bench.growth.measure` at 80 columns."""
    facts, logits = figures["facts"], figures["logits"]
    head = (
        f"bench growth on {clean(str(facts['backend']))}, {clean(str(facts['device']))}: {facts['dtype']}, "
        f"{plural(facts['threads'], 'thread')}\nms of a verify forward, median of {facts['steps']}\n"
    )
    trees, contexts = figures["trees_by_batch"], figures["batches_by_prefix"]
    parts = [
        head,
        grid(f"trees by batch, after {trees[0]['prefix']} tokens", trees, "nodes", "batch"),
        grid(f"batches by context, trees of {contexts[0]['nodes']} nodes", contexts, "prefix", "batch"),
        _lines(figures["lines"]),
        grid(f"the head alone, {figures['vocabulary'][0]['rows']} rows", figures["vocabulary"], "vocabulary", "rows"),
        f"logits of all rows: {logits['all_ms']:.1f} ms; of the last alone: {logits['last_ms']:.1f} ms "
        f"({logits['ratio']:.2f} times)\n",
    ]
    return "\n".join(parts)


def grid(title: str, rows: list[dict[str, Any]], across: str, down: str) -> str:
    """Times in ms: a column for each value of `across`, a row for each value of `down`."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column(f"{down} \\ {across}")
    columns = list(dict.fromkeys(row[across] for row in rows))
    for name in columns:
        table.add_column(str(name), justify="right")
    time_ms = {(row[down], row[across]): row["ms"] for row in rows}
    for name in dict.fromkeys(row[down] for row in rows):
        cells = [time_ms.get((name, column)) for column in columns]
        table.add_row(str(name), *("-" if cell is None else f"{cell:.1f}" for cell in cells))
    return plain_text(table)


def _lines(lines: list[dict[str, Any]]) -> str:
    table = Table(title="straight lines through the times", title_justify="left", box=None, padding=(0, 1, 0, 0))
    for name, right in (("by", False), ("at", False), ("ms at 0", True), ("ms for one more", True), ("R²", True)):
        table.add_column(name, justify="right" if right else "left")
    for line in lines:
        straight = "-" if line["straight"] is None else f"{line['straight']:.3f}"
        table.add_row(line["by"], line["at"], f"{line['base_ms']:.1f}", f"{line['each_ms']:.3f}", straight)
    return plain_text(table)


def oracle_page(figures: dict[str, Any]) -> str:
    """The figures of `specverify.bench.oracle.measure` at 80 columns."""
    title = f"bench oracle on {clean(figures['model'])}, after {figures['context']} tokens, float64"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for name in ("nodes", "oracle ms", "transformers ms", "ratio", "logits apart"):
        table.add_column(name, justify="right")
    for row in figures["trees"]:
        times = [f"{row[name]:.2f}" for name in ("oracle_ms", "transformers_ms", "ratio")]
        table.add_row(str(row["nodes"]), *times, f"{row['apart']:.1g}")
    wrong = "" if figures["same"] else "the two do not compute the same: the times mean nothing\n"
    return plain_text(table) + wrong
