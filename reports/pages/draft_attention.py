"""The page of `bench draft-attention`: shares of attention by distance."""

from collections.abc import Mapping
from textwrap import fill
from typing import Any

from rich.table import Table

from specverify.reports.format import clean, plural
from specverify.reports.layout80 import plain_text


def attention_by_distance(figures: Mapping[str, Any]) -> str:
    """The figures of `specverify.bench.draft_attention.measure` at 80 columns."""
    facts = figures["facts"]
    head = f"bench draft-attention of {clean(str(facts['draft']))}, {plural(facts['prompts'], 'prompt')}"
    lengths = list(dict.fromkeys(row["length"] for row in figures["rows"]))
    buckets = list(dict.fromkeys(row["bucket"] for row in figures["rows"]))
    table = Table(title="percent by distance in tokens", title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("prompt", justify="right")
    table.add_column("of", no_wrap=True)
    for bucket in buckets:
        table.add_column(bucket, justify="right")
    row_at = {(row["length"], row["bucket"]): row for row in figures["rows"]}
    for length in lengths:
        for name, words in (("top1", "top-1"), ("mass", "all weight"), ("columns", "columns seen")):
            shares = [f"{100 * row_at[length, bucket][name]:.1f}" for bucket in buckets]
            table.add_row("-" if length is None else str(length), words, *shares)
    lines = []
    for row in figures["far"]:
        after = "" if row["length"] is None else f"after {row['length']} tokens, "
        share = "nothing looks at any other token" if row["top1"] is None else f"{100 * row['top1']:.1f} %"
        lines.append(f"{after}top-1 at {row['from']} tokens and more, the first token left out: {share}")
    return "\n".join([fill(head, 80), "", plain_text(table), *lines]) + "\n"
