"""The command `diff`: run the plan, show progress, write every report, return the exit code."""

import sys
from dataclasses import replace
from pathlib import Path

from properties.finding import Verdict
from properties.tally import Failure, Tally
from reports import bundle, junit, record, terminal, writing
from reports.progress import Progress
from specverify import campaign
from specverify.news import Opened
from specverify.plan import Plan


def diff(plan: Plan, report: Path, junit_file: str | None, json_file: str | None) -> int:
    """Carry out `plan` and report into the folder `report`.

    Returns:
        0 agree, 1 differ, 2 wrong input, 3 could not judge.

    Raises:
        Unwritable: when the report folder, or a file that was asked for, cannot be written; before any case runs
            where that can be known.
    """
    try:
        report.mkdir(parents=True, exist_ok=True)
    except OSError as why:
        raise writing.Unwritable.because(report, why) from None
    for file in filter(None, (junit_file, json_file)):
        writing.check(file)
    with record.Lines(report / "results.jsonl") as lines, Progress(plan.cases) as progress:

        def opened(news: Opened) -> None:
            progress.wanted = news.wanted if plan.model is not None else plan.cases

        def arrived(verdict: Verdict) -> None:
            lines.add(verdict)
            progress.advance(1, failures=int(bool(verdict.findings)))
            if verdict.findings:
                progress.note("shrinking")

        tally, refused = campaign.run(plan, arrived, opened)
    if refused is not None and not (tally.failures if refused == 2 else tally.cases):
        errors = "; ".join(" ".join(line.split()) for line in tally.errors)
        print(f"specverify: {errors}", file=sys.stderr)  # noqa: T201 - the shell's own voice
        return refused
    tally.failures = [_saved(report, failure, tally) for failure in tally.failures]
    show(tally, sys.stderr if json_file == "-" else sys.stdout)
    if junit_file is not None:
        writing.write_whole(junit_file, junit.junit(tally))
    if json_file is not None:
        writing.write_json(json_file, record.summary(tally))
    return tally.exit_code


def _saved(report: Path, failure: Failure, tally: Tally) -> Failure:
    """The failure with its bundle written."""
    return replace(failure, file=str(bundle.save(report, failure, tally.environment)))


def show(tally: Tally, out: object) -> None:
    """Print the page of each failure, then the page of the run."""
    for failure in tally.failures:
        print(terminal.failure_page(failure), file=out)  # type: ignore[call-overload]
    print(terminal.summary_page(tally), file=out)  # type: ignore[call-overload]
