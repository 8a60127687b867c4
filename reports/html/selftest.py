"""The page of `selftest`, and pages of figures: benches and calibration."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from specverify.reports.format import cut, number, plural
from specverify.reports.html.document import render_page
from specverify.reports.html.pictures.bars import Bars, share_bars
from specverify.reports.pages.selftest import FaultHunt, SelfTest

WHAT = (
    "Defects that were reported in public are planted in an engine, one at a time, and the checks must find each. "
    "Between them the engine runs without a defect, and the checks must stay quiet."
)
"""The explanation of a self-test for a reader who never met one."""

CLASSES = (1, 5, 20, 60, 200, 1000)
"""Upper ends of the classes of cases until a fault was caught."""


def selftest_page(report: SelfTest, version: str) -> bytes:
    """The page of a self-test."""
    caught_hunts = [hunt for hunt in report.tried_faults if hunt.caught]
    outcome = {0: "agree", 1: "differ"}.get(report.exit_code, "unjudged")
    facts = {
        "title": "Self-test",
        "version": version,
        "outcome": outcome,
        "word": {"agree": "All caught", "differ": "Not all caught"}.get(outcome, "Could not judge"),
        "verdict": f"{len(caught_hunts)} of {plural(len(report.tried_faults), 'planted fault')} were caught.",
        "what": WHAT,
        "wrong": _error_lines(report),
        "todo": _advice(report),
        "charts": [
            chart
            for chart in (_cases_chart(caught_hunts), _invariant_chart(caught_hunts), _stage_chart(report))
            if chart is not None
        ],
        "lines": [_line(hunt) for hunt in sorted(report.faults, key=_rank)],
        "idle": report.idle_invariants if caught_hunts else [],
        "clean": (sum(run.cases for run in report.clean_runs), len(report.false_alarms)),
        "errors": [cut(error, 400) for error in report.errors],
        "seconds": number(report.seconds),
    }
    return render_page("selftest.html.j2", facts)


def _error_lines(report: SelfTest) -> list[str]:
    lines = [
        f"The fault {cut(hunt.name, 80)} escaped in {plural(hunt.cases, 'case')}." for hunt in report.escaped_faults
    ]
    lines += [
        f"False alarm on {cut(run.backend, 80)}: {cut(str(run.by), 80)} differed on case {cut(str(run.case), 40)}."
        for run in report.false_alarms
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


def _rank(hunt: FaultHunt) -> tuple[bool, bool, str]:
    """Escaped faults first, then those that did not run, then the others by name."""
    return hunt.caught or hunt.is_harmless, hunt.missing is not None, hunt.name


def _line(hunt: FaultHunt) -> dict[str, Any]:
    if hunt.missing is not None:
        state, catcher = "silent", f"not run: {cut(hunt.missing, 200)}"
    elif hunt.caught:
        state, catcher = "checked", cut(str(hunt.by), 80)
    elif hunt.is_harmless:
        state, catcher = "silent", "changes no law, with a proof"
    else:
        state, catcher = "failed", "ESCAPED" if hunt.cases else "not hunted: no time was left"
    has_run = hunt.missing is None
    return {
        "name": cut(hunt.name, 80),
        "id": cut(hunt.id, 40),
        "state": state,
        "by": catcher,
        "planted": hunt.stage_planted,
        "named": hunt.stage_named or "",
        "counts": (str(hunt.cases), number(hunt.seconds), str(hunt.nodes)) if has_run else ("", "", ""),
    }


def _cases_chart(caught_hunts: list[FaultHunt]) -> Bars | None:
    """How many cases it took until each fault was caught."""
    counts = dict.fromkeys((*(f"up to {end}" for end in CLASSES), f"more than {CLASSES[-1]}"), 0)
    for hunt in caught_hunts:
        end = next((f"up to {end}" for end in CLASSES if hunt.cases <= end), f"more than {CLASSES[-1]}")
        counts[end] += 1
    note = "The thin line is Wilson's 95 % interval of the share."
    return share_bars("Cases until a fault was caught", {name: count for name, count in counts.items() if count}, note)


def _invariant_chart(caught_hunts: list[FaultHunt]) -> Bars | None:
    return share_bars("Caught first by", dict(Counter(cut(str(hunt.by), 60) for hunt in caught_hunts).most_common()))


def _stage_chart(report: SelfTest) -> Bars | None:
    outcomes = Counter(
        "as planted" if hunt.stage_named == hunt.stage_planted else "another one"
        for hunt in report.tried_faults
        if hunt.caught
    )
    return share_bars("The stage that was named", dict(outcomes.most_common()))


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
        return cut(", ".join(f"{key}: {_figure_text(item)}" for key, item in value.items()), 600)
    if isinstance(value, (list, tuple)):
        return cut(", ".join(map(_figure_text, value)), 600)
    return "–" if value is None else cut(str(value), 600)
