"""The page of `selftest`, and pages of figures: benches and calibration."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from reports.format import cut, number, plural
from reports.html.document import render_page
from reports.html.pictures.bars import Bars, share_bars
from reports.pages.selftest import FaultHunt, SelfTest

WHAT = (
    "Defects that were reported in public are planted in an engine, one at a time, and the checks must find each. "
    "Between them the engine runs without a defect, and the checks must stay quiet."
)
"""The explanation of a self-test for a reader who never met one."""

CLASSES = (1, 5, 20, 60, 200, 1000)
"""Upper ends of the classes of cases until a fault was caught."""


def selftest_page(report: SelfTest, version: str) -> bytes:
    """The page of a self-test."""
    caught = [one for one in report.tried_faults if one.caught]
    outcome = {0: "agree", 1: "differ"}.get(report.exit_code, "unjudged")
    facts = {
        "title": "Self-test",
        "version": version,
        "outcome": outcome,
        "word": {"agree": "All caught", "differ": "Not all caught"}.get(outcome, "Could not judge"),
        "verdict": f"{len(caught)} of {plural(len(report.tried_faults), 'planted fault')} were caught.",
        "what": WHAT,
        "wrong": _error_lines(report),
        "todo": _advice(report),
        "charts": [
            chart
            for chart in (_cases_chart(caught), _invariant_chart(caught), _stage_chart(report))
            if chart is not None
        ],
        "lines": [_line(one) for one in sorted(report.faults, key=_rank)],
        "idle": report.idle_invariants if caught else [],
        "clean": (sum(one.cases for one in report.clean_runs), len(report.false_alarms)),
        "errors": [cut(one, 400) for one in report.errors],
        "seconds": number(report.seconds),
    }
    return render_page("selftest.html.j2", facts)


def _error_lines(report: SelfTest) -> list[str]:
    lines = [f"The fault {cut(one.name, 80)} escaped in {plural(one.cases, 'case')}." for one in report.escaped_faults]
    lines += [
        f"False alarm on {cut(one.backend, 80)}: {cut(str(one.by), 80)} differed on case {cut(str(one.case), 40)}."
        for one in report.false_alarms
    ]
    if report.unhunted_faults:
        lines.append(f"For {plural(len(report.unhunted_faults), 'fault')} no time was left.")
    return lines[:40]


def _advice(report: SelfTest) -> str:
    if report.escaped_faults:
        return "Give more --budget; if a fault still escapes, an invariant or a kind of case is missing."
    if report.false_alarms:
        return "Replay the case of the false alarm: an invariant asks for what is not true."
    if report.unhunted_faults or report.errors:
        return "Give more --budget, and read the errors: what did not run is no pass."
    return "Nothing: the checks find what they are there for."


def _rank(one: FaultHunt) -> tuple[bool, bool, str]:
    """Escaped faults first, then those that did not run, then the others by name."""
    return one.caught or one.is_harmless, one.missing is not None, one.name


def _line(one: FaultHunt) -> dict[str, Any]:
    if one.missing is not None:
        state, by = "silent", f"not run: {cut(one.missing, 200)}"
    elif one.caught:
        state, by = "checked", cut(str(one.by), 80)
    elif one.is_harmless:
        state, by = "silent", "changes no law, with a proof"
    else:
        state, by = "failed", "ESCAPED" if one.cases else "not hunted: no time was left"
    ran = one.missing is None
    return {
        "name": cut(one.name, 80),
        "id": cut(one.id, 40),
        "state": state,
        "by": by,
        "planted": one.stage_planted,
        "named": one.stage_named or "",
        "counts": (str(one.cases), number(one.seconds), str(one.nodes)) if ran else ("", "", ""),
    }


def _cases_chart(caught: list[FaultHunt]) -> Bars | None:
    """How many cases it took until each fault was caught."""
    counts = dict.fromkeys((*(f"up to {end}" for end in CLASSES), f"more than {CLASSES[-1]}"), 0)
    for one in caught:
        end = next((f"up to {end}" for end in CLASSES if one.cases <= end), f"more than {CLASSES[-1]}")
        counts[end] += 1
    note = "The thin line is Wilson's 95 % interval of the share."
    return share_bars("Cases until a fault was caught", {name: count for name, count in counts.items() if count}, note)


def _invariant_chart(caught: list[FaultHunt]) -> Bars | None:
    return share_bars("Caught first by", dict(Counter(cut(str(one.by), 60) for one in caught).most_common()))


def _stage_chart(report: SelfTest) -> Bars | None:
    named = Counter(
        "as planted" if one.stage_named == one.stage_planted else "another one"
        for one in report.tried_faults
        if one.caught
    )
    return share_bars("The stage that was named", dict(named.most_common()))


def figures_page(title: str, what: str, figures: Mapping[str, Any], version: str) -> bytes:
    """The page of a bench or a calibration: its figures, and each list of rows among them as a table."""
    single, tables = tables_of(figures)
    facts = {"title": title, "what": what, "version": version, "single": single, "tables": tables}
    return render_page("figures.html.j2", facts)


def tables_of(figures: Mapping[str, Any]) -> tuple[list[tuple[str, str]], list[dict[str, Any]]]:
    """Single figures as names and texts, and each list of rows among them as a table."""
    single = [(cut(name, 80), _figure_text(value)) for name, value in figures.items() if not _is_table(value)]
    tables = []
    for name, value in figures.items():
        if _is_table(value):
            columns = list(dict.fromkeys(key for row in value for key in row))
            rows = [[_figure_text(row.get(key)) for key in columns] for row in value[:500]]
            tables.append({"name": cut(name, 80), "columns": [cut(str(key), 60) for key in columns], "rows": rows})
    return single, tables


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def _figure_text(value: Any) -> str:
    if isinstance(value, float):
        return number(value)
    if isinstance(value, Mapping):
        return cut(", ".join(f"{key}: {_figure_text(one)}" for key, one in value.items()), 600)
    if isinstance(value, (list, tuple)):
        return cut(", ".join(map(_figure_text, value)), 600)
    return "–" if value is None else cut(str(value), 600)
