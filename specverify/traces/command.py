"""The commands `trace check` and `trace schema`."""

import click


@click.group()
def trace() -> None:
    """Audit a trace that any engine wrote, without running the engine; print the format of such files."""


@trace.command()
@click.argument("file", type=click.Path())
@click.option("--model", metavar="DIR|ID", help="The target's checkpoint; with it, tokens and numbers are judged too.")
@click.option("--invariant", "invariants", multiple=True, metavar="GLOB", help="Only these invariants; repeatable.")
@click.option("--json", "json_file", metavar="FILE|-", help="Write the result as one JSON object.")
def check(file: str, model: str | None, invariants: tuple[str, ...], json_file: str | None) -> int:
    """Judge every run of FILE, JSON lines as `trace schema` describes them, by the invariants of `diff`.

    Exit codes: 0 agree, 1 differ, 2 unreadable, 3 nothing could be judged.
    """
    from reports import writing
    from reports.pages.trace_audit import REASONS, audit_page, finding_line
    from reports.record import finding_fact, summary
    from specverify.checkpoints.opening import open_checkpoint
    from specverify.traces.audit import audit

    if json_file is not None:
        writing.check(json_file)
    found = audit(file, None if model is None else open_checkpoint(model), invariants)
    lines = [finding_line(file, one.line, one.run, one.finding) for one in found.located]
    page = audit_page(file, found.tally, lines, found.unasked, found.doubts)
    click.echo(page.rstrip("\n"), err=json_file == "-")
    if json_file is not None:
        facts = summary(found.tally)
        unasked = [
            {"invariant": name, "why": REASONS[kind].format(stages=stages), "runs": count}
            for name, reasons in found.unasked.items()
            for (kind, stages), count in reasons.items()
        ]
        told = {
            "outcome": facts["outcome"],
            "file": file,
            "runs": facts["cases"],
            "judged": facts["judged"],
            "invariants": facts["invariants"],
            "findings": [{"line": one.line, "run": one.run, **finding_fact(one.finding)} for one in found.located],
            "ties": facts["ties"],
            "unasked": unasked,
            "no_pass": found.doubts,
        }
        writing.write_json(json_file, told)
    return found.exit_code


@trace.command()
def schema() -> int:
    """Print the JSON Schema of one line of a trace."""
    from reference.recorded.schema import schema as whole
    from reports.writing import write_json

    write_json("-", whole())
    return 0
