"""Tables of the commands `list`, `doctor`, `bench` and `dispatch learn`, at 80 columns."""

from typing import Any

from rich.table import Table

from specverify.reference.draft_trees import tree_description
from specverify.reference.tree import RankTree
from specverify.reports.format import clean, number, outside, plural
from specverify.reports.layout80 import plain_text
from specverify.reports.pages import bench_advice as advice


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
        if row.get("excluded"):
            sentence += f"; not judged: {outside(row['excluded'])}"
        if row.get("known"):
            sentence += f"; known to be wrong: {outside(row['known'])}"
        table.add_row(clean(str(row["name"])), clean(str(state)), clean(str(sentence)))
    return plain_text(table)


def figures_table(figures: dict[str, Any]) -> str:
    """The figures of `bench`: names and values."""
    table = Table(title="bench", title_justify="left", box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in figures.items():
        table.add_row(name, number(value) if isinstance(value, float) else clean(str(value)))
    return plain_text(table)


def heads_table(figures: dict[str, Any]) -> str:
    """The table of `bench heads`: layers, feed-forward block and positions of each head, and tokens per call."""
    title = f"bench heads: tokens per call on {plural(figures['prompts'], 'held-out prompt')}, greedy"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for name in ("layers", "feed-forward", "iRoPE", "weights", "steps", "loss", "chain of 4", "tree of 24"):
        table.add_column(name, justify="left" if name in ("feed-forward", "iRoPE") else "right", no_wrap=True)
    for row in figures["heads"]:
        table.add_row(
            str(row["layers"]),
            row["feed_forward"],
            "yes" if row["irope"] else "no",
            f"{row['weights'] / 1e6:.2f} M",
            f"{row['steps']}" if row["finished"] else f"{row['steps']}, cut off",
            "–" if row["loss"] is None else f"{row['loss']:.4f}",
            f"{row['chain_tokens_per_call']:.2f}",
            f"{row['tree_tokens_per_call']:.2f}",
        )
    lookup = f"n-gram lookup: {figures['ngram_chain']:.2f} in a chain of 4, {figures['ngram_tree']:.2f} in a tree of 18"
    return f"{plain_text(table)}\n{lookup}"


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
    return plain_text(table) + advice.kv_advice(figures)


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
    pages.append(advice.attention_advice(figures))
    return "\n".join(pages)


def learned_page(draft: str, steps: int, rows: list[tuple[int, RankTree, float, float]]) -> str:
    """The rows of a learned table: batch size, tree, expected tokens of a request's step, tokens per unit of time."""
    title = f"trees by batch size, from {plural(steps, 'step')} of the draft {clean(draft)}"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("batch up to", justify="right", no_wrap=True)
    table.add_column("tree")
    table.add_column("tokens a step", justify="right", no_wrap=True)
    table.add_column("tokens per time", justify="right", no_wrap=True)
    for batch, tree, tokens, rate in rows:
        table.add_row(str(batch), tree_description(tree), number(tokens), number(rate))
    return plain_text(table).rstrip("\n")


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
        advice.growth_advice(figures),
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
        # A slope through times that lie on no line says nothing of what one more costs.
        fits = (line["straight"] or 0.0) >= advice.STRAIGHT
        times = (f"{line['base_ms']:.1f}", f"{line['each_ms']:.3f}") if fits else ("-", "-")
        table.add_row(line["by"], line["at"], *times, straight)
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
    return plain_text(table) + wrong + (advice.oracle_advice(figures) if figures["same"] else "")
