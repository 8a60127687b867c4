"""The commands `trace check`, `schema`, `show`, `merge` and `compare`."""

from pathlib import Path

import click


@click.group()
def trace() -> None:
    """Audit a trace that any engine wrote, without running the engine; read records that `--trace` wrote."""


@trace.command()
@click.argument("file", type=click.Path())
@click.option("--model", metavar="DIR|ID", help="The target's checkpoint; with it, tokens and numbers are judged too.")
@click.option("--invariant", "invariants", multiple=True, metavar="GLOB", help="Only these invariants; repeatable.")
@click.option("--json", "json_file", metavar="FILE|-", help="Write the result as one JSON object.")
@click.option("--prefix", is_flag=True, help="Runs may be cut off: judge what there is of them.")
def check(file: str, model: str | None, invariants: tuple[str, ...], json_file: str | None, prefix: bool) -> int:
    """Judge every run of FILE, JSON lines as `trace schema` describes them, by the invariants of `diff`.

    Exit codes: 0 agree, 1 differ, 2 unreadable, 3 nothing could be judged, or a run was cut off.
    """
    from reports import writing
    from reports.pages.trace_audit import REASONS, audit_page, finding_line
    from reports.record import finding_fact, summary
    from specverify.checkpoints.opening import open_checkpoint
    from specverify.traces.audit import audit

    if json_file is not None:
        writing.check_writable(json_file)
    found = audit(file, None if model is None else open_checkpoint(model), invariants, prefix)
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
@click.option("--record", is_flag=True, help="The format of the records that `diff` and `bench decode` write.")
def schema(record: bool) -> int:
    """Print the JSON Schema of one line of a trace, or of the parts of a record."""
    from reference.recorded.schema import schema as of_trace
    from reports.writing import write_json
    from specverify.records.read import schema as of_record

    write_json("-", of_record() if record else of_trace())
    return 0


@trace.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--json", "json_file", metavar="FILE|-", help="Write the record as one JSON object.")
@click.option("--html", "html_file", metavar="FILE", help="Write the record as one HTML page.")
def show(folder: Path, json_file: str | None, html_file: str | None) -> int:
    """Show the record that `--trace DIR` wrote, of a whole run or of its shards.

    Exit codes: 0, or 3 where a shard is missing; 2 where a part of the record is damaged.
    """
    from reports import writing
    from reports.pages.records import diff_turns, record_head
    from specverify.records.merge import merged, shards_in
    from specverify.records.read import BENCH, FAILURES, MANIFEST, read
    from specverify.setup.report_files import check_apart

    check_apart({"--json": json_file, "--html": html_file})
    for file in filter(None, (json_file, html_file)):
        writing.check_writable(file)
    whole = (folder / MANIFEST).exists()
    shards = [] if whole else [one for one in shards_in([folder]) if one != folder]
    record = merged(shards) if shards else read(folder)
    failures = sorted(str(one) for place in (folder, *shards) for one in (place / FAILURES).glob("*.json"))
    page = record_head(str(folder), record.manifest, len(record.finished), record.torn, failures)
    figures = {"manifest": record.manifest, "turns": record.finished, "failures": failures, "torn": record.torn}
    code = 3 if record.manifest.get("missing") else 0
    if record.manifest["kind"] == BENCH:
        from specverify.bench.decode_figures import told
        from specverify.bench.decode_record import recorded

        if record.finished:
            content, bench_page, _ = told(recorded(record))
            figures |= content
            page += "\n" + bench_page
    else:
        page += diff_turns(record.finished)
    click.echo(page.rstrip("\n"), err="-" in (json_file, html_file))
    if json_file is not None:
        writing.write_json(json_file, figures)
    if html_file is not None:
        from reports.html.record import record_page
        from specverify import __version__

        writing.write_whole(html_file, record_page(str(folder), figures, __version__))
    return code


@trace.command()
@click.argument("folders", metavar="DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", required=True, metavar="DIR", type=click.Path(path_type=Path), help="The folder to write.")
def merge(folders: tuple[Path, ...], out: Path) -> int:
    """Put the whole shards in DIR... together as one record, and say which are missing.

    A DIR is a shard, or the folder of a run that holds shards. Exit codes: 0, or 3 where a shard is missing.
    """
    from specverify.records.merge import merged, shards_in, write

    record = merged(shards_in(folders))
    write(record, out)
    missing = record.manifest.get("missing", [])
    click.echo("\n".join([f"{out}: {len(record.finished)} turns", *missing]))
    return 3 if missing else 0


@trace.command()
@click.argument("first", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("second", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--json", "json_file", metavar="FILE|-", help="Write the comparison as one JSON object.")
def compare(first: Path, second: Path, json_file: str | None) -> int:
    """Compare two records turn by turn: tokens, accepted paths and tree sizes must be equal, times may differ.

    Exit codes: 0 equal, 1 a turn differs, 2 unreadable, 3 no turn is in both.
    """
    from reports import writing
    from reports.pages.records import comparison_page
    from specverify.records.compare import COMPARED, compared
    from specverify.records.read import read

    if json_file is not None:
        writing.check_writable(json_file)
    found = compared(read(first), read(second))
    differ = [
        {**dict(zip(("prompt", "repeat", "way", "place"), key, strict=True)), "fields": names}
        for key, names in found.differ.items()
    ]
    figures = {"compared": COMPARED, **vars(found), "differ": differ}
    click.echo(comparison_page(figures).rstrip("\n"), err=json_file == "-")
    if json_file is not None:
        writing.write_json(json_file, figures)
    return found.exit_code
