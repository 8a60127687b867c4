"""A gate on the terminal: failures, the runs side by side, what to do next."""

from rich.table import Table
from rich.text import Text

from specverify.properties.gate_result import ELSEWHERE, GateResult, GateRun
from specverify.reports.bundle import ledger_command, replay_command
from specverify.reports.counts import reference_rows, varied_rows
from specverify.reports.format import HEADLINES, clean, cut, number, plural
from specverify.reports.gate import words
from specverify.reports.layout80 import MARGIN, WIDTH, indent, label_rows, plain_text, wrapping_text
from specverify.reports.pages.summary import opening, summary_page
from specverify.reports.pages.terminal import failure_page, labelled_lines, wrapped_command

MOST_FAILURES = 10
"""Most failures of a run that the page shows whole."""


def seeds_line(result: GateResult) -> str:
    """The seeds, told before the first case."""
    fixed_seeds = ", ".join(str(seed) for seed in result.seeds if seed != result.fresh)
    fresh_words = f"{'; ' if fixed_seeds else ''}new in this run: {result.fresh}" if result.fresh is not None else ""
    return f"seeds {fixed_seeds}{fresh_words}; the same cases again: {words.rerun_command(result)}"


def gate_output(result: GateResult, width: int = WIDTH, verbose: bool = False) -> str:
    """First sentences and failures of each run, with `verbose` its counts, and then the result of the gate."""
    parts = []
    for run in result.runs:
        parts += [opening(run.tally, width), failure_pages(run, width)]
        parts += [summary_page(run.tally, width, verbose=True)] if verbose else []
    return "\n".join([*filter(None, parts), gate_page(result, width)])


def failure_pages(run: GateRun, width: int = WIDTH) -> str:
    """The failures of one run, each on a page."""
    failures = run.tally.failures
    omission = (
        f"{plural(len(failures) - MOST_FAILURES, 'further failure')} in the reports\n"
        if len(failures) > MOST_FAILURES
        else ""
    )
    return "\n".join(
        [
            *(failure_page(failure, width=width) for failure in failures[:MOST_FAILURES]),
            *([omission] if omission else []),
        ]
    )


def gate_page(result: GateResult, width: int = WIDTH) -> str:
    """The result of the whole gate."""
    emulated = "  EMULATED, no hardware was judged" if any(run.tally.emulated for run in result.runs) else ""
    head = f"{HEADLINES[result.outcome]}  specverify gate{emulated}\n"
    parts = [plain_text(wrapping_text(head), width=width) + labelled_lines(words.verdict(result), width)]
    if result.runs:
        parts.append(indent(_side_by_side(result, width)))
    facts = [("not judged", reason) for reason in words.reasons(result)]
    facts += [
        ("known", words.known_line(known_failure)) for known_failure in result.known if known_failure.state != ELSEWHERE
    ]
    facts += [
        ("behind", f"{cut(name, 200)}, in {plural(count, 'case')}") for name, count in _hidden_differences(result)
    ]
    facts += [
        ("left out", f"{run.title}: {cut(sentence, 300)}") for run in result.runs for sentence in run.tally.excluded
    ]
    for run in result.runs:
        rows = [*reference_rows(run.tally), *varied_rows(run.tally)]
        facts += [(label, f"{run.title}: {text}") for label, text in rows]
    facts += [("note", cut(note, 300)) for note in result.notes]
    facts += [("seeds", seeds_line(result)), ("time", f"{number(result.seconds)} s")]
    parts.append(label_rows(facts, width))
    for _, failure in words.failures(result)[:MOST_FAILURES]:
        command = replay_command(failure)
        if command is not None:
            parts.append(wrapped_command(command, " " * MARGIN + "next    ", width))
        accept = ledger_command(failure)
        if accept is not None:
            parts.append(wrapped_command(accept, " " * MARGIN + "accept  ", width))
    return "\n".join(part.strip("\n") + "\n" for part in parts)


def _hidden_differences(result: GateResult) -> list[tuple[str, int]]:
    """Differences behind known failures: they may be consequences, and are not judged as new."""
    return result.behind.most_common(MOST_FAILURES)


def _side_by_side(result: GateResult, width: int) -> str:
    rows = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    rows.add_column(Text("backend"), overflow="fold")
    rows.add_column(Text("result"), no_wrap=True)
    for name in ("judged", "drawn", "differ", "known", "invariants"):
        rows.add_column(Text(name), justify="right", no_wrap=True)
    for run in result.runs:
        tally = run.tally
        num_checked = sum(1 for counts in tally.invariants.values() if counts.checked)
        counts = (tally.judged, tally.cases, tally.differed, sum(1 for _ in tally.known.elements()), num_checked)
        cells = (clean(run.title), HEADLINES[run.outcome], *map(str, counts))
        rows.add_row(*(Text(cell) for cell in cells))
    return plain_text(rows, width=width - MARGIN)
