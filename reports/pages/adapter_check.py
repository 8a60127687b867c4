"""The page of `check-adapter`: each case, what was reached, and what to do next."""

from collections.abc import Sequence

from specverify.properties.tally import Tally
from specverify.properties.verdict.finding import Verdict
from specverify.reference.trace import Stage
from specverify.reports.case_diff import case_summary
from specverify.reports.counts import short_count
from specverify.reports.format import address, clean, excess, plural, show
from specverify.reports.layout80 import label_rows

STEPS = {
    "raised": "mend the first traceback above; then run this command again",
    "differs": "see the first case whole, made as small as it gets: specverify diff --backend {name}",
    "internal": "report the exception above with its case: the judge raised, not the adapter; the rest was judged",
    "declined": "declare what the engine takes, and cases ask for nothing else; Unsupported is for what no field says",
    "not compared": "show what the engine emits: without tokens nothing can be compared",
    "agrees": "judge all of it: specverify diff --backend {name}, then pytest -p specverify --pyargs "
    "specverify.conformance --backend {name}",
}
"""The next step after each outcome; the first of them that some case has is told."""


def case_lines(number: int, verdict: Verdict, outcome: str, traceback: str | None) -> str:
    """One case: a line, and below it what differs, why it was declined, or the whole traceback."""
    lines = [f"{outcome:<12}  case {number}, {verdict.case.id}: {clean(case_summary(verdict.case))}"]
    first = verdict.first
    if traceback is not None:
        lines += [f"  {line}" for line in traceback.rstrip("\n").split("\n")]
    elif first is not None:
        lines.append(f"  {clean(first.invariant)}, {clean(address(first))}")
        excess_words = f" ({excess(first)})" if excess(first) else ""
        lines += [f"  expected {show(first.expected)}", f"  observed {show(first.observed)}{excess_words}"]
        lines += [f"  {clean(line)}" for line in first.said]
    elif verdict.internal:
        lines += [f"  {clean(error.invariant)}: {clean(error.why)}" for error in verdict.internal]
    elif verdict.unsupported is not None:
        lines.append(f"  {clean(verdict.unsupported)}")
    return "\n".join(lines)


def examination_page(
    name: str,
    tally: Tally,
    outcomes: Sequence[tuple[str, int]],
    never_shown: Sequence[Stage],
    gained: Sequence[tuple[Stage, Sequence[str]]],
    never_drawn: Sequence[str],
) -> str:
    """The summary of an examination.

    `outcomes` are those of STEPS with their numbers of cases; `never_shown` stages are declared and no trace held them;
    `gained` ones are not declared, with the invariants that each would add; `never_drawn` is what the declaration
    leaves out.
    """
    outcome_words = [f"{outcome} {count}" for outcome, count in outcomes if count]
    compared_words = [
        f"{name_} ({short_count(counts.compared)})" for name_, counts in tally.invariants.items() if counts.checked
    ]
    gained_names = {name_ for _, names in gained for name_ in names}
    silent_names = [
        name_ for name_, counts in tally.invariants.items() if not counts.checked and name_ not in gained_names
    ]
    rows = [
        ("cases", f"{', '.join(outcome_words) or 'none'} of {tally.cases}"),
        ("shown", ", ".join(stage.word for stage in sorted(tally.revealed)) or "nothing"),
        ("compared", ", ".join(compared_words) or "nothing"),
    ]
    if silent_names:
        rows.append(("no occasion", f"in these few cases: {', '.join(silent_names)}"))
    if never_shown:
        words = ", ".join(stage.word for stage in never_shown)
        rows.append(("missing", f"declared, and no trace holds it: {words}; fill the stage, or do not declare it"))
    rows += [(f"+ {stage.word}", _gain(added)) for stage, added in gained]
    rows += [("never drawn", clean(line)) for line in never_drawn]
    rows += [("declined", f"{plural(count, 'case')}: {clean(reason)}") for reason, count in tally.unsupported.items()]
    step = next((words for outcome, words in STEPS.items() if dict(outcomes).get(outcome)), STEPS["not compared"])
    shown_name = f"'{name}'" if " " in name else name
    rows.append(("next", step.format(name=shown_name)))
    return label_rows(rows)


def _gain(added: Sequence[str]) -> str:
    """The gain of one stage more, as a clause."""
    if not added:
        return "adds no invariant; it says where a wrong number began"
    return f"lets {plural(len(added), 'invariant')} more speak, where they apply: {', '.join(added)}"
