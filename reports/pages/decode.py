"""The page of `bench decode`: speed, accepted tokens, stages and texts by way."""

from textwrap import fill
from typing import Any

from rich.table import Table

from reports.counts import way_rows
from reports.format import clean, number, plural
from reports.layout80 import plain_text

TIMES = ("tpot_ms", "ttft_ms", "prefill_ms")
"""The times of a way, in the order of the columns."""

SHOWN = 3
"""Most texts of a way that are shown to differ."""


def decode_page(figures: dict[str, Any]) -> str:
    """The figures of `specverify.bench.decode_figures.figures` at 80 columns."""
    facts, rows = figures["facts"], figures["ways"]
    prompts = plural(facts["prompts"], "turn" if facts.get("dialogues") else "prompt")
    if facts.get("dialogues"):
        prompts = f"{plural(facts['dialogues'], 'dialogue')} of {prompts}"
    head = (
        f"bench decode on {clean(str(facts['backend']))}, {clean(str(facts['device']))}: {facts['dtype']}, "
        f"{plural(facts['threads'], 'thread')}, {prompts}, greedy"
    )
    grids = [_budget_grid(one) for one in figures["grids"]]
    lengths = _lengths(figures.get("lengths", []))
    dialogues = _dialogues(figures.get("dialogues", []))
    parts = [
        fill(head, 80) + "\n",
        _speeds(rows),
        _times(rows),
        _acceptance(rows),
        *grids,
        lengths,
        dialogues,
        _stages(rows),
    ]
    parts.append(_texts(figures["texts"]))
    drafted = [one for one in rows if one["break_even"] is not None]
    if len(drafted) > 1:
        best = max(drafted, key=lambda one: one["tokens_per_s"])
        parts.append(f"fastest draft: {clean(best['way'])}, {best['speed_up']['mean']:.2f} times the target alone\n")
    parts += [
        fill(f"{clean(one['way'])}: attention {text}", 80) + "\n"
        for one in rows
        for _, text in way_rows(one.get("fallbacks", {}))
    ]
    parts.append(_memory(rows))
    parts += [f"{line}\n" for line in figures.get("missing", ())]
    if figures.get("resumed"):
        taken = "dialogue" if facts.get("dialogues") else "prompt"
        parts.append(f"{plural(figures['resumed'], taken)} taken from the record of an earlier run\n")
    parts.append(f"memory: {facts['peak_resident_mb']:.0f} MB resident at most, all ways together\n")
    return "\n".join(part for part in parts if part)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("way", overflow="fold")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _speeds(rows: list[dict[str, Any]]) -> str:
    title = "speed; × is over the target alone, turn by turn"
    table = _table(title, "tok/s", "×", "p50", "p90", "p99", "TPOT ms", "TTFT ms", "prefill")
    for one in rows:
        speed = one["speed_up"]
        cells = [f"{one['tokens_per_s']:.1f}", *(f"{speed[name]:.2f}" for name in ("mean", "p50", "p90", "p99"))]
        times = ["-" if one[name] is None else f"{one[name]:.1f}" for name in TIMES]
        table.add_row(clean(one["way"]), *cells, *times)
    return plain_text(table)


def _times(rows: list[dict[str, Any]]) -> str:
    ranks = ("p50", "p90", "p99")
    table = _table("times over turns in ms: each further token, first token, prefill", *ranks, *ranks, *ranks)
    for one in rows:
        spreads = [one["spreads"][name] for name in TIMES]
        cells = ["-" if spread is None else f"{spread[rank]:.1f}" for spread in spreads for rank in ranks]
        table.add_row(clean(one["way"]), *cells)
    return plain_text(table)


def _memory(rows: list[dict[str, Any]]) -> str:
    names = ("target", "draft", "KV", "peak")
    table = _table("memory in MiB: weights, KV caches, and the most in use during the way", *names)
    for one in rows:
        held = [one["memory"][name] for name in ("target_mb", "draft_mb", "kv_mb", "peak_mb")]
        table.add_row(clean(one["way"]), *("-" if value is None else f"{value:.4g}" for value in held))
    return plain_text(table)


def _acceptance(rows: list[dict[str, Any]]) -> str:
    table = _table(
        "accepted drafted tokens per step; break-even is the mean that a step's cost asks for",
        "mean", "p50", "p90", "p99", "break-even", "steps", "drafts", "drafted", "rejected",
    )  # fmt: skip
    shown = [one for one in rows if one["accepted"] is not None]
    if not shown:
        return ""
    for one in shown:
        taken = one["accepted"]
        table.add_row(
            clean(one["way"]), f"{taken['mean']:.2f}", f"{taken['p50']:.0f}", f"{taken['p90']:.0f}",
            f"{taken['p99']:.0f}",
            f"{one['break_even']:.2f}", *(str(one[name]) for name in ("steps", "draft_calls", "drafted", "rejected")),
        )  # fmt: skip
    deepest = max(len(one["by_depth"]) for one in shown)
    depths = _table("share of the trees of that depth in which it was accepted", *map(str, range(1, deepest + 1)))
    for one in shown:
        shares = [f"{share:.2f}" for share in one["by_depth"]]
        depths.add_row(clean(one["way"]), *shares, *[""] * (deepest - len(shares)))
    return plain_text(table) + "\n" + plain_text(depths)


def _lengths(rows: list[dict[str, Any]]) -> str:
    """Ways by the length of the prompts; empty where prompts had their own."""
    if not rows:
        return ""
    table = _table("by tokens of the prompt", "tokens", "tok/s", "×", "accepted", "TPOT ms", "TTFT ms", "prefill")
    for one in rows:
        taken = one["accepted"]
        times = ["-" if one[name] is None else f"{one[name]:.1f}" for name in TIMES]
        cells = [str(one["context"]), f"{one['tokens_per_s']:.1f}", f"{one['speed_up']['mean']:.2f}"]
        table.add_row(clean(one["way"]), *cells, "-" if taken is None else f"{taken['mean']:.2f}", *times)
    return plain_text(table)


def _dialogues(rows: list[dict[str, Any]]) -> str:
    """Ways by turn of the dialogue; empty where no dialogue ran."""
    if not rows:
        return ""
    table = _table(
        "by turn: its prompt with the history, and the columns of it that the cache had",
        "turn", "tokens", "kept", "tok/s", "×", "accepted", "TPOT ms", "TTFT ms",
    )  # fmt: skip
    for one in rows:
        taken = one["accepted"]
        times = ["-" if one[name] is None else f"{one[name]:.1f}" for name in TIMES[:2]]
        cells = [str(one["place"]), f"{one['context']:.0f}", f"{one['kept']:.0f}", f"{one['tokens_per_s']:.1f}"]
        cells += [f"{one['speed_up']['mean']:.2f}", "-" if taken is None else f"{taken['mean']:.2f}", *times]
        table.add_row(clean(one["way"]), *cells)
    later = [one for one in rows if one["place"] > 1]
    anew = [
        way
        for way in dict.fromkeys(one["way"] for one in later)
        if not any(one["kept"] for one in later if one["way"] == way)
    ]
    line = "every turn with an empty cache: " + ", ".join(map(clean, anew))
    return plain_text(table) + (fill(line, 80) + "\n" if anew else "")


def _budget_grid(grid: dict[str, Any]) -> str:
    """The budgets of one draft: a row for each depth, a column for each number of nodes, and the best one."""
    title = f"budgets of {clean(grid['draft'])}: × over the target alone, and accepted tokens per step"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("levels", justify="right")
    for nodes in grid["nodes"]:
        table.add_column(plural(nodes, "node"), justify="right")
    at = {(cell["nodes"], cell["depth"]): cell for cell in grid["cells"]}
    for depth in grid["depths"]:
        cells = [at.get((nodes, depth)) for nodes in grid["nodes"]]
        table.add_row(str(depth), *("-" if cell is None else _budget(cell) for cell in cells))
    best = grid["best"]
    why = "it drafts nothing"
    if best["accepted"] is not None:
        why = f"it accepts {best['accepted']:.2f} per step and breaks even at {best['break_even']:.2f}"
    line = (
        f"best budget: {plural(best['nodes'], 'node')} in {plural(best['depth'], 'level')}, "
        f"{best['speed_up']:.2f} times the target alone;\n{why}\n"
    )
    return plain_text(table) + line


def _budget(cell: dict[str, Any]) -> str:
    accepted = cell["accepted"]
    return f"{cell['speed_up']:.2f}× {'-' if accepted is None else format(accepted, '.2f')}"


def _stages(rows: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(name for one in rows for name in one["stages"]))
    if not names:
        return ""
    table = _table("share of the time by stage, in percent", *names)
    for one in rows:
        if one["stages"]:
            table.add_row(clean(one["way"]), *(f"{100 * one['stages'].get(name, 0.0):.1f}" for name in names))
    shares = [f"{clean(one['way'])} {100 * one['beyond_forwards']:.1f}" for one in rows if one["stages"]]
    title = "of a step without its prefill, percent beyond forwards: "
    return plain_text(table) + fill(title + ", ".join(shares), 80) + "\n"


def _texts(texts: list[dict[str, Any]]) -> str:
    table = Table(title="texts, beside the target's own", title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("way", overflow="fold", ratio=1)
    table.add_column("equal", justify="right")
    table.add_column("tied", justify="right")
    table.add_column("other", ratio=2, overflow="fold")
    for one in texts:
        other = [
            f"{_place_words(place)}, from token {place['at'] + 1} on: {number(place['gap'])} below the best"
            f" logit (noise {number(place['noise'])})"
            for place in one["other"][:SHOWN]
        ]
        if len(one["other"]) > SHOWN:
            other.append(f"and {plural(len(one['other']) - SHOWN, 'further text')}")
        table.add_row(clean(one["way"]), str(one["equal"]), str(one["tied"]), "; ".join(other) or "none")
    return plain_text(table)


def _place_words(text: dict[str, Any]) -> str:
    """The prompt of a text, or its dialogue and its turn, numbered from 1 on."""
    number = text["prompt"] + 1
    return f"dialogue {number}, turn {text['place']}" if text.get("place") else f"prompt {number}"
