"""The page of `bench acceptance`: times of each way to verify a batch, and what they advise."""

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any

from rich.table import Table

from specverify.reports.format import clean, number, plural
from specverify.reports.layout80 import plain_text

ALONE = "each alone"
"""The way by whose times those of the others are divided."""

WORDS = {"one call": "one call, not compiled", "captured": "one captured call", "inductor": "one call by inductor"}
"""The words of each way in a sentence."""

Row = Mapping[str, Any]


def acceptance_page(figures: Mapping[str, Any]) -> str:
    """The figures of `specverify.bench.acceptance.measure` at 80 columns."""
    accepted = ", ".join(
        f"{row['rule']} accepts {number(row['accepted'])} tokens in {plural(row['levels'], 'level')}"
        for row in figures["rules"]
    )
    head = (
        f"bench acceptance: trees of {figures['nodes']} nodes, {figures['vocabulary']} tokens, float32, "
        f"{plural(figures['threads'], 'thread')}; on average {accepted}"
    )
    title = f"ms of a call after warm-up, median and quartiles of {figures['rounds']}"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for name in ("rule", "batch", "way", "compiled", "warm-up s", "ms", "quartiles", "ratio"):
        table.add_column(name, justify="left" if name in ("rule", "way") else "right", no_wrap=True)
    for row in figures["rows"]:
        table.add_row(
            row["rule"],
            str(row["batch"]),
            clean(row["way"]),
            str(row["compilations"] + row["late"]),
            number(row["warmup_s"]),
            number(row["median_ms"]),
            f"{number(row['low_ms'])} to {number(row['high_ms'])}",
            f"{row['ratio']:.2f}",
        )
    lines = [f"{name}: not measured: {clean(reason)}" for name, reason in figures["absent"].items()]
    lines += [
        f"{row['rule']}, batch {row['batch']}, {clean(row['way'])}: {plural(row['differences'], 'request')} decided "
        "otherwise than alone"
        for row in figures["rows"]
        if row["differences"]
    ]
    paragraphs = [fill(line, 80) for line in [*lines, advise(figures)]]
    return "\n".join([fill(head, 80), "", plain_text(table), *paragraphs]) + "\n"


def advise(figures: Mapping[str, Any]) -> str:
    """The sentence that says how to verify: by the way that is fastest at the largest batch for every rule."""
    if not figures["same"]:
        return "Advice: none; a way that decides otherwise is wrong, and its times mean nothing."
    rows: Sequence[Row] = figures["rows"]
    largest = max(row["batch"] for row in rows)
    slowest = {way: max(ratios) for way, ratios in _ratios(rows, largest).items() if way != ALONE}
    best = min(slowest, key=lambda way: slowest[way], default=ALONE)
    if best == ALONE or slowest[best] >= 1:
        return f"Advice: verify each request alone; no other way was faster for every rule in a batch of {largest}."
    if not _is_clear(rows, best, largest):
        return (
            f"Advice: none; in a batch of {largest} the quartiles of {WORDS[best]} and of each alone overlap: measure "
            "on a quieter machine."
        )
    ratios = _ratios(rows, largest)[best]
    share = " to ".join(dict.fromkeys(f"{ratio:.2f}" for ratio in (min(ratios), max(ratios))))
    parts = [
        f"Advice: verify a batch in {WORDS[best]}: at {largest} requests it takes {share} of the time of each alone"
    ]
    parts += _repayment(rows, best, largest)
    parts += _exception(rows, best)
    return "; ".join(parts) + "."


def _ratios(rows: Sequence[Row], batch: int) -> dict[str, list[float]]:
    """The ratios of each way that was measured for every rule in a batch of this size."""
    rules = {row["rule"] for row in rows}
    ratios: dict[str, list[float]] = {}
    for row in rows:
        if row["batch"] == batch:
            ratios.setdefault(row["way"], []).append(row["ratio"])
    return {way: values for way, values in ratios.items() if len(values) == len(rules)}


def _is_clear(rows: Sequence[Row], best: str, batch: int) -> bool:
    """Whether for every rule the upper quartile of `best` lies below the lower one of each alone."""
    at_batch = {(row["rule"], row["way"]): row for row in rows if row["batch"] == batch}
    return all(row["high_ms"] < at_batch[rule, ALONE]["low_ms"] for (rule, way), row in at_batch.items() if way == best)


def _repayment(rows: Sequence[Row], best: str, largest: int) -> list[str]:
    """After how many calls a compiled way has paid back its warm-up, against the fastest way that compiles nothing."""
    calls = []
    for rule in {row["rule"]: None for row in rows}:
        of_rule = [row for row in rows if row["rule"] == rule]
        warmup = sum(row["warmup_s"] for row in of_rule if row["way"] == best)
        if not any(row["compilations"] for row in of_rule if row["way"] == best):
            return []
        medians = {row["way"]: row["median_ms"] for row in of_rule if row["batch"] == largest}
        plain = {row["way"] for row in of_rule} - {row["way"] for row in of_rule if row["compilations"]}
        saved = min(medians[way] for way in plain) - medians[best]
        if saved <= 0:
            return [f"for {rule} its warm-up of {number(warmup)} s is never paid back"]
        calls.append((1000 * warmup / saved, warmup))
    most, warmup = max(calls)
    return [f"its warm-up of {number(warmup)} s is paid back after {number(round(most))} calls of that size"]


def _exception(rows: Sequence[Row], best: str) -> list[str]:
    """The sizes of batch in which requests alone are as fast."""
    sizes = sorted({row["batch"] for row in rows if row["way"] == best and row["ratio"] >= 1})
    if not sizes:
        return []
    return [f"in a batch of {' or '.join(map(str, sizes))}, each alone is as fast or faster"]
