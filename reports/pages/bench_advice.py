"""Advice: the sentence with which a bench ends, made from its figures alone."""

from collections.abc import Iterable, Mapping
from textwrap import fill
from typing import Any

from specverify.reports.format import clean, plural

STRAIGHT = 0.9
"""The least R² of times by size at which what one more costs is named."""

TARGET_OVERHEAD = 2.0
"""Wall time over time in the backend's forwards that `throughput` is to keep below."""

Figures = Mapping[str, Any]


def attention_advice(figures: Figures) -> str:
    """From which prefix on each way to compute attention takes less time than SDPA under a dense mask."""
    rows = [row for row in figures["rows"] if row["path"] not in ("sdpa", "read")]
    sentences = []
    for path in dict.fromkeys(row["path"] for row in rows):
        rows_of_path = [row for row in rows if row["path"] == path]
        prefixes = sorted({row["prefix"] for row in rows_of_path})
        # A prefix counts where the path is faster there and at all longer ones, whatever batch and tree.
        slower = [row["prefix"] for row in rows_of_path if row["ratio"] >= 1]
        paying = [prefix for prefix in prefixes if not slower or prefix > max(slower)]
        if paying:
            sentences.append(f"{clean(path)} pays from {paying[0]:,} columns")
        else:
            sentences.append(f"{clean(path)} does not pay at {prefixes[-1]:,} columns")
    return _sentence(sentences)


def kv_advice(figures: Figures) -> str:
    """The layout that verifies in the least time at the longest prefix, and the layout whose commits grow least."""
    longest = max(row["prefix"] for row in figures["rows"])
    rows = [row for row in figures["rows"] if row["prefix"] == longest]
    fastest = min(rows, key=lambda row: row["verify_us"])
    steadiest = min(rows, key=lambda row: row["commit_ratio"])
    return _sentence(
        [
            f"at {longest:,} columns {_layout(fastest)} verifies in the least time",
            f"the commits of {_layout(steadiest)} grow least, to {steadiest['commit_ratio']:.1f} times",
        ]
    )


def _layout(row: Figures) -> str:
    return f"{clean(row['layout'])} with pages of {row['page_size']}" if row["page_size"] else clean(row["layout"])


def growth_advice(figures: Figures) -> str:
    """What one more node or request costs, where the times lie on a line; else that they do not."""
    lines = [line for line in figures["lines"] if line["each_ms"] is not None]
    straight = [line for line in lines if (line["straight"] or 0.0) >= STRAIGHT]
    if not straight:
        return _sentence(["the times lie on no line (R² below 0.9)", "time more steps on a quiet machine"])
    sentences = []
    for name in dict.fromkeys(line["by"] for line in straight):
        line = next(line for line in straight if line["by"] == name)
        share = line["each_ms"] / line["base_ms"] if line["base_ms"] > 0 else 0.0
        words = f"one more of {clean(name)} adds {line['each_ms']:.2f} ms at {clean(line['at'])}"
        sentences.append(f"{words}, {share:.1%} of a forward" if share > 0 else words)
    left_out = len(lines) - len(straight)
    if left_out:
        sentences.append(f"{plural(left_out, 'other line')} of times {'is' if left_out == 1 else 'are'} not straight")
    return _sentence(sentences)


def oracle_advice(figures: Figures) -> str:
    """How the oracle's time compares with transformers' on the largest tree."""
    row = max(figures["trees"], key=lambda tree: tree["nodes"])
    words = "more" if row["ratio"] > 1 else "less"
    return _sentence([f"on {plural(row['nodes'], 'node')} the oracle takes {words} time than transformers in float64"])


def throughput_advice(figures: Figures) -> str:
    """Whether the run's time goes to the backend or to the judge."""
    overhead = figures["overhead"]
    if overhead <= TARGET_OVERHEAD:
        return _sentence([f"{1 / overhead:.0%} of the time goes to the backend: a faster backend makes runs shorter"])
    return _sentence([f"{1 - 1 / overhead:.0%} of the time goes to drawing and judging, more than half"])


def decode_advice(figures: Figures) -> str:
    """Of each draft, whether it pays, and if not, how far it is from paying; nothing where no draft was timed."""
    sentences = []
    for row in figures["ways"]:
        if row["break_even"] is None:
            continue
        speed_up = row["speed_up"]["mean"]
        if speed_up > 1:
            sentences.append(f"{clean(row['way'])} pays")
        else:
            accepted = row["accepted"]["mean"]
            sentences.append(
                f"{clean(row['way'])} does not pay: it accepts {accepted:.2f} tokens per step, and its cost asks for"
                f" {row['break_even']:.2f}"
            )
    return _sentence(sentences) if sentences else ""


def _sentence(parts: Iterable[str]) -> str:
    return fill(f"advice: {'; '.join(parts)}", 80) + "\n"
