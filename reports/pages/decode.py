"""The page of `bench decode`: speed, accepted tokens, stages and texts by way."""

from textwrap import fill
from typing import Any

from rich.table import Table

from specverify.properties.tally import native_calls
from specverify.reports.counts import way_rows
from specverify.reports.format import clean, number, plural
from specverify.reports.layout80 import plain_text
from specverify.reports.pages.bench_advice import decode_advice
from specverify.reports.pages.decode_series import cell_tables, draft_tables, with_error

TIMES = ("tpot_ms", "ttft_ms", "prefill_ms")
"""The times of a way, in the order of the columns."""

STEP_STAGES = ("draft", "lower", "mask", "verify", "accept", "commit")
"""The stages of a step whose times are shown by history."""

MOST_TEXTS = 3
"""Most texts of a way that are shown to differ."""


def decode_page(figures: dict[str, Any]) -> str:
    """The figures of `specverify.bench.decode_figures.figures` at 80 columns."""
    facts, rows = figures["facts"], figures["ways"]
    prompts = plural(facts["prompts"], "turn" if facts.get("dialogues") else "prompt")
    if facts.get("dialogues"):
        prompts = f"{plural(facts['dialogues'], 'dialogue')} of {prompts}"
    head = (
        f"bench decode on {clean(str(facts['backend']))}, {clean(str(facts['device']))}: {facts['dtype']}, "
        f"{plural(facts['threads'], 'thread')}, {prompts}, {facts.get('sampling', 'greedy')}"
    )
    grids = [_budget_grid(grid) for grid in figures["grids"]]
    dialogues = _dialogues(figures.get("dialogues", []))
    parts = [
        fill(head, 80) + "\n",
        _speeds(rows),
        _times(rows),
        _acceptance(rows),
        *grids,
        *draft_tables(figures),
        *cell_tables(figures.get("cells", [])),
        dialogues,
        _stages(rows),
        _stage_times(rows),
    ]
    if facts.get("compared", True):
        parts.append(_texts(figures["texts"]))
    else:
        parts.append("texts are sampled, and so not compared: `specverify diff --temperature` judges their law\n")
    drafting_rows = [row for row in rows if row["break_even"] is not None]
    if len(drafting_rows) > 1:
        best = max(drafting_rows, key=lambda row: row["tokens_per_s"])
        parts.append(f"fastest draft: {clean(best['way'])}, {best['speed_up']['mean']:.2f} times the target alone\n")
    parts += [
        fill(f"{clean(row['way'])}: attention {text}", 80) + "\n"
        for row in rows
        for _, text in way_rows(row.get("fallbacks", {}))
    ]
    parts.append(_native(facts, rows))
    parts.append(_memory(rows))
    waits = [f"{clean(way)} {count:.1f}" for way, count in facts.get("waits_per_step", {}).items()]
    if waits:
        parts.append(fill(f"waits of the host for the device in a step: {', '.join(waits)}", 80) + "\n")
    parts += [f"{line}\n" for line in figures.get("missing", ())]
    if figures.get("resumed"):
        noun = "dialogue" if facts.get("dialogues") else "prompt"
        parts.append(f"{plural(figures['resumed'], noun)} taken from the record of an earlier run\n")
    if "peak_resident_mb" in facts:
        parts.append(f"memory: {facts['peak_resident_mb']:.0f} MB resident at most, all ways together\n")
    parts.append(decode_advice(figures))
    return "\n".join(part for part in parts if part)


def _native(facts: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The attention calls of each way that ran the backend's own attention; empty for a backend without one."""
    if not facts.get("own_attention"):
        return ""
    mode = str(facts.get("mode", "unknown"))
    counts = []
    for row in rows:
        calls = row["attention_calls"]
        if calls:
            counts.append(f"{clean(row['way'])} {native_calls(mode, calls, row['fallbacks'])} of {calls}")
    lines = f"own attention, in mode {clean(mode)}: {', '.join(counts)} calls"
    if mode.endswith("trees eager"):
        lines += "; trees run eager attention and the target alone does not, so that a speed-up holds the kernel's part"
    return fill(lines, 80) + "\n"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("way", overflow="fold")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _speeds(rows: list[dict[str, Any]]) -> str:
    title = "speed; × is over the target alone, turn by turn"
    table = _table(title, "tok/s", "×", "p50", "p90", "p99", "TPOT ms", "TTFT ms", "prefill")
    for row in rows:
        speed = row["speed_up"]
        cells = [f"{row['tokens_per_s']:.1f}", *(f"{speed[name]:.2f}" for name in ("mean", "p50", "p90", "p99"))]
        times = ["-" if row[name] is None else f"{row[name]:.1f}" for name in TIMES]
        table.add_row(clean(row["way"]), *cells, *times)
    return plain_text(table)


def _times(rows: list[dict[str, Any]]) -> str:
    ranks = ("p50", "p90", "p99")
    table = _table("times over turns in ms: each further token, first token, prefill", *ranks, *ranks, *ranks)
    for row in rows:
        spreads = [row["spreads"][name] for name in TIMES]
        cells = ["-" if spread is None else f"{spread[rank]:.1f}" for spread in spreads for rank in ranks]
        table.add_row(clean(row["way"]), *cells)
    return plain_text(table)


def _memory(rows: list[dict[str, Any]]) -> str:
    names = ("target", "draft", "parameters", "target KV", "draft KV", "peak")
    table = _table("memory in MiB: weights, KV caches, and the most that the way holds at once", *names)
    for row in rows:
        sizes_mb = [row["memory"][name] for name in ("target_mb", "draft_mb", "target_kv_mb", "draft_kv_mb", "peak_mb")]
        cells = ["-" if value is None else f"{value:.4g}" for value in sizes_mb]
        parameters = row["memory"]["draft_parameters"]
        cells.insert(2, "-" if parameters is None else str(parameters))
        table.add_row(clean(row["way"]), *cells)
    return plain_text(table) + "parameters: the number of the draft's weights\n"


def _acceptance(rows: list[dict[str, Any]]) -> str:
    table = _table(
        "tokens per verify call, accepted drafted tokens per step, and break-even",
        "per call", "mean", "p50", "p90", "p99", "break-even", "steps", "drafts", "drafted", "rejected",
    )  # fmt: skip
    drafting_rows = [row for row in rows if row["accepted"] is not None]
    if not drafting_rows:
        return ""
    for row in drafting_rows:
        accepted = row["accepted"]
        shares = [f"{accepted['mean']:.2f}", *(f"{accepted[rank]:.0f}" for rank in ("p50", "p90", "p99"))]
        counts = [str(row[name]) for name in ("steps", "draft_calls", "drafted", "rejected")]
        per_call = with_error(row["tokens_per_call"], row["tokens_per_call_error"])
        break_even = with_error(row["break_even"], row["break_even_error"])
        table.add_row(clean(row["way"]), per_call, *shares, break_even, *counts)
    deepest = max(len(row["by_depth"]) for row in drafting_rows)
    depths = _table("share of the trees of that depth in which it was accepted", *map(str, range(1, deepest + 1)))
    for row in drafting_rows:
        shares = [f"{share:.2f}" for share in row["by_depth"]]
        depths.add_row(clean(row["way"]), *shares, *[""] * (deepest - len(shares)))
    has_errors = any(row["tokens_per_call_error"] is not None for row in drafting_rows)
    errors = "±: standard error over prompts" if has_errors else "one prompt has no error"
    words = f"break-even: the mean that a step's cost asks for; {errors}\n"
    return plain_text(table) + words + "\n" + plain_text(depths)


def _dialogues(rows: list[dict[str, Any]]) -> str:
    """Ways by turn of the dialogue; empty where no dialogue ran."""
    if not rows:
        return ""
    shaped = any(row.get("prefix") or row.get("history") for row in rows)
    table = _table(
        "by turn: its prompt with the history, and the columns of it that the cache had",
        *(("prefix", "history") if shaped else ()),
        "turn", "tokens", "kept", "tok/s", "×", "accepted", "TPOT ms", "TTFT ms",
    )  # fmt: skip
    stages = _table("milliseconds of a step by stage, after these histories", "prefix", "history", "turn", *STEP_STAGES)
    for row in rows:
        accepted = row["accepted"]
        times = ["-" if row[name] is None else f"{row[name]:.1f}" for name in TIMES[:2]]
        cells = [str(row["place"]), f"{row['context']:.0f}", f"{row['kept']:.0f}", f"{row['tokens_per_s']:.1f}"]
        cells += [f"{row['speed_up']['mean']:.2f}", "-" if accepted is None else f"{accepted['mean']:.2f}", *times]
        lengths = [str(row["prefix"] or "-"), str(row["history"] or "-")] if shaped else []
        table.add_row(clean(row["way"]), *lengths, *cells)
        means = [row["stage_ms"].get(name, {}).get("mean") for name in STEP_STAGES]
        if shaped and row["stage_ms"]:
            stage_cells = ["-" if mean is None else f"{mean:.3g}" for mean in means]
            stages.add_row(clean(row["way"]), *lengths, str(row["place"]), *stage_cells)
    later_rows = [row for row in rows if row["place"] > 1]
    uncached_ways = [
        way
        for way in dict.fromkeys(row["way"] for row in later_rows)
        if not any(row["kept"] for row in later_rows if row["way"] == way)
    ]
    line = "every turn with an empty cache: " + ", ".join(map(clean, uncached_ways))
    uncached = fill(line, 80) + "\n" if uncached_ways else ""
    return plain_text(table) + uncached + ("\n" + plain_text(stages) if shaped else "")


def _budget_grid(grid: dict[str, Any]) -> str:
    """The budgets of one draft: a row for each depth, a column for each number of nodes, and the best one."""
    title = f"budgets of {clean(grid['draft'])}: × over the target alone, and accepted tokens per step"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("levels", justify="right")
    for nodes in grid["nodes"]:
        table.add_column(plural(nodes, "node"), justify="right")
    cell_at = {(cell["nodes"], cell["depth"]): cell for cell in grid["cells"]}
    for depth in grid["depths"]:
        cells = [cell_at.get((nodes, depth)) for nodes in grid["nodes"]]
        table.add_row(str(depth), *("-" if cell is None else _budget(cell) for cell in cells))
    best = grid["best"]
    reason = "it drafts nothing"
    if best["accepted"] is not None:
        reason = f"it accepts {best['accepted']:.2f} per step and breaks even at {best['break_even']:.2f}"
    line = (
        f"best budget: {plural(best['nodes'], 'node')} in {plural(best['depth'], 'level')}, "
        f"{best['speed_up']:.2f} times the target alone;\n{reason}\n"
    )
    return plain_text(table) + line


def _budget(cell: dict[str, Any]) -> str:
    accepted = cell["accepted"]
    return f"{cell['speed_up']:.2f}× {'-' if accepted is None else format(accepted, '.2f')}"


def _stages(rows: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row["stages"]))
    if not names:
        return ""
    table = _table("share of the time by stage, in percent", *names)
    for row in rows:
        if row["stages"]:
            table.add_row(clean(row["way"]), *(f"{100 * row['stages'].get(name, 0.0):.1f}" for name in names))
    shares = [f"{clean(row['way'])} {100 * row['beyond_forwards']:.1f}" for row in rows if row["stages"]]
    title = "of a step without its prefill, percent beyond forwards: "
    return plain_text(table) + fill(title + ", ".join(shares), 80) + "\n"


def _stage_times(rows: list[dict[str, Any]]) -> str:
    """Milliseconds of each stage, and how far its tail lies above its mean; empty where no way shows stages."""
    rows = [row for row in rows if row["stage_ms"]]
    names = list(dict.fromkeys(name for row in rows for name in row["stage_ms"]))
    if not names:
        return ""
    means = _table("milliseconds by stage: the mean of a step (prefill: of a text)", *names)
    tails = _table("p99 of these milliseconds over their mean", *names)
    for row in rows:
        stages = [row["stage_ms"].get(name) for name in names]
        means.add_row(clean(row["way"]), *("-" if stage is None else f"{stage['mean']:.3g}" for stage in stages))
        tails.add_row(clean(row["way"]), *("-" if stage is None else f"{stage['tail']:.2f}" for stage in stages))
    return plain_text(means) + "\n" + plain_text(tails)


def _texts(texts: list[dict[str, Any]]) -> str:
    table = Table(title="texts, beside the target's own", title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("way", overflow="fold", ratio=1)
    table.add_column("equal", justify="right")
    table.add_column("tied", justify="right")
    table.add_column("other", ratio=2, overflow="fold")
    for text in texts:
        differences = [
            f"{_place_words(place)}, from token {place['at'] + 1} on: {number(place['gap'])} below the best"
            f" logit (noise {number(place['noise'])})"
            for place in text["other"][:MOST_TEXTS]
        ]
        if len(text["other"]) > MOST_TEXTS:
            differences.append(f"and {plural(len(text['other']) - MOST_TEXTS, 'further text')}")
        table.add_row(clean(text["way"]), str(text["equal"]), str(text["tied"]), "; ".join(differences) or "none")
    return plain_text(table)


def _place_words(text: dict[str, Any]) -> str:
    """The prompt of a text, or its dialogue and its turn, numbered from 1 on."""
    number = text["prompt"] + 1
    return f"dialogue {number}, turn {text['place']}" if text.get("place") else f"prompt {number}"
