"""Pages of what was measured: the score of mutants with every survivor, what draws reach, and false alarms."""

import textwrap
from typing import Any

from rich.table import Table

from specverify.reports.format import clean, number, plural
from specverify.reports.layout80 import plain_text

WIDTH = 150
"""Characters of a line of the clean cases' record."""


def mutants_page(figures: dict[str, Any]) -> str:
    """The page; the figures are those of `tests.measure.mutation.bench.figures_of`."""
    judged = figures["caught"] + figures["survived"]
    lines = [
        f"mutants --of {figures['of']}: {figures['caught']} of {judged} caught, {figures['score']:.1%} "
        f"(goal {figures['goal']:.0%})",
        f"  sample {figures['sample']} of {figures['population']}, seed {figures['seed']}; "
        f"{figures['equivalent']} known to be equivalent; {sum(figures['not_run'].values())} not run here",
        f"  caught at: {_counts(figures['caught_at'])}",
        f"  caught as: {_counts(figures['caught_how'])}",
        f"  left out by rule: {_counts(figures['skipped'])}",
    ]
    lines += [f"  not run: {count} × {why}" for why, count in figures["not_run"].items()]
    if figures["not_judged"] or figures["not_finished"]:
        lines.append(
            f"  NOT FINISHED: {plural(figures['not_judged'], 'mutant')} not judged, "
            f"{figures['not_finished']} survived what there was time for"
        )
    lines += [f"  THE CLEAN ENGINE DIFFERS: {clean(finding)}" for finding in figures["clean_findings"]]
    lines += [f"  RECORD FITS NO LINE: {clean(record)}" for record in figures["idle_records"]]
    lines += [f"  caught by {name}: {count}" for name, count in list(figures["caught_by"].items())[:12]]
    for survivor in figures["survivors"]:
        place = survivor["within"] or "the module"
        lines.append(
            f"survived {survivor['id']} in {place} ({survivor['stage']}, {survivor['judged']} cases, "
            f"{survivor['differing']} differ; marker {survivor['marker']})"
        )
        lines += [f"  - {clean(survivor['before'])}", f"  + {clean(survivor['after'])}"]
    return "\n".join(lines)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"


def search_table(figures: dict[str, Any]) -> str:
    """The table of `search`: the first case of each condition, the median over searches, and its share."""
    title = f"search: {plural(figures['searches'], 'search')} of {plural(figures['cases'], 'case')}, "
    title += f"seed {figures['seed']}, in {number(figures['seconds'])} s"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("condition", overflow="fold")
    table.add_column("first case", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    for row in figures["rows"]:
        first = "not met" if row["first"] is None else str(row["first"])
        table.add_row(clean(row["name"]), first, f"{100 * row['share']:.1f} %")
    return plain_text(table)


def gate_time_table(figures: dict[str, Any]) -> str:
    """The tables of `gate-time`: minutes by part, and every factor with its source."""
    title = f"gate-time: {plural(figures['prompts'], 'prompt')} of {figures['tokens']} tokens, greedy and sampled, "
    title += f"on one {figures['card']}: {number(figures['minutes'])} min"
    minutes = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    minutes.add_column("minutes of")
    for kind in figures["kinds"]:
        minutes.add_column(kind, justify="right", no_wrap=True)
    for part in next(iter(figures["kinds"].values())):
        minutes.add_row(part, *(number(parts[part]) for parts in figures["kinds"].values()))
    factors = Table(title="factors", title_justify="left", box=None, padding=(0, 2, 0, 0))
    factors.add_column("factor", overflow="fold")
    factors.add_column("value", justify="right", no_wrap=True)
    factors.add_column("source", overflow="fold")
    for row in figures["factors"]:
        factors.add_row(row["name"], f"{row['value']:.4g} {row['unit']}".strip(), row["source"])
    return plain_text(minutes) + plain_text(factors)


def pairs_table(figures: dict[str, Any]) -> str:
    """The table of `pairs`: the share of pairs met after so many cases, and the pairs that one search never met."""
    title = f"pairs: {number(figures['possible'])} may meet on {figures['backend']}, in {number(figures['seconds'])} s"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in ("seed", "cases", "met", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in figures["rows"]:
        table.add_row(str(row["seed"]), str(row["cases"]), str(row["met"]), f"{100 * row['share']:.1f} %")
    names = [
        f"never met with seed {seed}: {clean(pair)}" for seed, pairs in figures["missing"].items() for pair in pairs
    ]
    return "\n".join([plain_text(table), *names])


def holdout_table(figures: dict[str, Any]) -> str:
    """The table of `holdout`: each patch with each seed, and what default draws said."""
    title = (
        f"holdout: {figures['found']} of {plural(figures['hunts'], 'hunt')} found in at most {figures['cases']} cases"
    )
    if figures["median_case"] is not None:
        title += f", half of them by case {number(figures['median_case'])}"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in ("patch", "seed", "outcome", "case", "invariant", "stage", "smallest case, or why"):
        table.add_column(name, overflow="fold")
    for row in figures["rows"]:
        cells = (row["patch"], row["seed"], row["outcome"], row["case"] or "", row["invariant"], row["stage"])
        table.add_row(*(clean(str(cell)) for cell in (*cells, row["shrunk"])))
    return plain_text(table)


def clean_table(figures: dict[str, Any]) -> str:
    """The record of `clean`: cases, findings, and the bound of their rate."""
    lines = [f"clean: {plural(figures['cases'], 'case')} of {plural(figures['commits'], 'commit')}: {_rate(figures)}"]
    judged_by = [f"{row['cases']} by {name}" for name, row in figures["by_backend"].items()]
    lines += _wrapped("  ", judged_by)
    lines += _wrapped("  FOUND: ", [clean(finding) for finding in figures["findings"]])
    lines += [f"  NOT FINISHED: {clean(why)}" for why in figures["unfinished"]]
    return "\n".join(lines)


def _wrapped(label: str, parts: list[str]) -> list[str]:
    """Lines of WIDTH characters that begin with `label` and list `parts`; none without parts."""
    return textwrap.wrap("; ".join(parts), WIDTH, initial_indent=label, subsequent_indent="  ", break_on_hyphens=False)


def _rate(figures: dict[str, Any]) -> str:
    found = plural(len(figures["findings"]), "finding") if figures["findings"] else "no finding"
    if figures["bound"] is None:
        return found
    return f"{found}, a rate below {figures['bound']:.1e} with {figures['confidence']:.0%} confidence"


def _stream_rows(streams: dict[str, Any]) -> list[tuple[str, str, str]]:
    """The rows on simulated runs whose bets know the draft."""
    mean = f"{number(streams['mean_e'])} ± {number(streams['standard_error'])}"
    largest = f"in e^{number(streams['largest'])}; {number(streams['red'])} of all runs red"
    rows = [
        ("runs", str(streams["runs"]), f"of {streams['cases']} cases, {streams['draws']} draws each"),
        ("mean e of a run", mean, "at most 1 where samplers are correct"),
        ("largest", number(streams["largest"]), largest),
    ]
    return rows + [
        (
            f"stream {name}",
            number(group["largest"]),
            f"the largest logarithm; {number(group['share_at_100'])} reach 100",
        )
        for name, group in streams["groups"].items()
    ]


def checkpoints_table(figures: dict[str, Any]) -> str:
    """What `checkpoints` found: each difference, and how far plain decode lay off in each dtype."""
    lines = [
        f"checkpoints: {plural(figures['cases'], 'case')} on {plural(figures['configs'], 'published config')} in "
        f"{number(figures['seconds'])} s: {plural(len(figures['findings']), 'finding')}"
    ]
    for dtype, worst in figures["control"].items():
        far = ", ".join(f"{ratio:.2f} times its {kind} ({name})" for kind, (ratio, name) in worst.items())
        lines.append(f"  plain decode in {dtype} lay at most {far} off")
    return "\n".join([*lines, *(f"  DIFFERS: {clean(finding)}" for finding in figures["findings"])])


def control_table(figures: dict[str, Any]) -> str:
    """The law that `control` measured: one row for each dtype and quantity."""
    title = f"control: {plural(figures['cases'], 'case')} of each dtype on {figures['backend']}, "
    title += f"in {number(figures['seconds'])} s"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("dtype", "quantity", "prompts", "targets", "mean log", "deviation", "largest", "statistic"):
        table.add_column(column, no_wrap=True)
    for row in figures["rows"]:
        numbers = (row["mean"], row["deviation"], row["largest"], row["statistic"])
        counts = str(row["prompts"]), str(row["targets"])
        table.add_row(row["dtype"], row["quantity"], *counts, *(f"{value:.2f}" for value in numbers))
    return plain_text(table) + (f"RED: {figures['red']}" if figures["red"] else "")


def calibration_table(figures: dict[str, Any]) -> str:
    """What `calibration` found: each figure, what it ought to be, and whether the gate stayed quiet."""
    tests, screen = figures["tests"], figures["screen_ks"]
    mean = f"{number(figures['mean_e'])} ± {number(figures['standard_error'])}"
    rows = [
        ("tests", str(tests), f"seed {figures['seed']}, each planned to show a total variation of {figures['tv']:g}"),
        ("mean e-value", mean, "at most 1 where samplers are correct"),
    ]
    uniform = f"Kolmogorov-Smirnov, p-value {number(screen['p_value'])}; near 0 where the screen's p-values are uniform"
    rows += [
        (f"e at least {tail['e']}", number(tail["share"]), f"of all; at most {number(tail['markov'])}")
        for tail in figures["tails"]
    ]
    rows += [
        ("screen", number(screen["statistic"]), uniform),
        ("flagged", str(figures["flagged"]), "went on from the screen to the bet"),
        ("suspect", str(figures["suspect"]), "undecided when the samples were used up"),
        ("failed", str(figures["failed"]), f"over the bar of {tests} tests on their own"),
        ("gate", "RED" if figures["red"] else "quiet", f"the whole run, false alarms at most {figures['alpha_run']:g}"),
        ("samples", str(figures["samples"]), f"in {number(figures['seconds'])} s"),
        *_stream_rows(figures["streams"]),
    ]
    table = Table(title="calibration", title_justify="left", box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(ratio=1)
    for row in rows:
        table.add_row(*row)
    return plain_text(table)
