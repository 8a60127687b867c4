"""The commands `trace check`, `schema`, `show`, `merge`, `compare` and `tap`."""

from pathlib import Path

import click

from specverify.commands import shared_options
from specverify.commands.shared_options import ALPHA
from specverify.traces.taps.command import tap


@click.group()
def trace() -> None:
    """Audit a trace that any engine wrote, without running the engine; read records that `--trace` wrote."""


trace.add_command(tap)


@trace.command()
@click.argument("file", type=click.Path())
@click.option("--model", metavar="DIR|ID", help="The target's checkpoint; with it, tokens and numbers are judged too.")
@click.option("--invariant", "invariants", multiple=True, metavar="GLOB", help="Only these invariants; repeatable.")
@click.option("--json", "json_file", metavar="FILE|-", help="Write the result as one JSON object.")
@click.option("--prefix", is_flag=True, help="Runs may be cut off: judge what there is of them.")
@click.option(
    "--share",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    show_default=True,
    help="With --model, judge this share of the steps by it, and the others without it.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Chooses the steps of --share.")
@shared_options.verbose("Name the invariants, and why the others were not asked.")
def check(
    *,
    file: str,
    model: str | None,
    invariants: tuple[str, ...],
    json_file: str | None,
    prefix: bool,
    share: float,
    seed: int,
    verbose: bool,
) -> int:
    """Judge every run of FILE, JSON lines as `trace schema` describes them, by the invariants of `diff`.

    Exit codes: 0 agree, 1 differ, 2 unreadable, 3 nothing could be judged, or a run was cut off.
    """
    from specverify.checkpoints.opening import open_checkpoint
    from specverify.reports.pages.trace import REASONS, audit_page, finding_line
    from specverify.reports.record import finding_fact, summary
    from specverify.setup.files import Outputs
    from specverify.traces.audit import audit

    outputs = Outputs(json_file)
    result = audit(file, None if model is None else open_checkpoint(model), invariants, prefix, share, seed)
    lines = [finding_line(file, located.line, located.run, located.finding) for located in result.findings]
    steps = (result.steps_by_model, result.steps)
    by_model = None if model is None else steps
    same_seed = result.law.same_seed
    page = audit_page(file, result.tally, lines, result.unasked, result.doubts, verbose, by_model, same_seed)
    facts = summary(result.tally)
    unasked = [
        {"invariant": name, "why": REASONS[kind].format(stages=stages), "runs": count}
        for name, reasons in result.unasked.items()
        for (kind, stages), count in reasons.items()
    ]
    content = {
        "outcome": facts["outcome"],
        "file": file,
        "runs": facts["cases"],
        "judged": facts["judged"],
        "steps": result.steps,
        "steps_by_model": result.steps_by_model,
        "invariants": facts["invariants"],
        "findings": [
            {"line": located.line, "run": located.run, **finding_fact(located.finding)} for located in result.findings
        ],
        "ties": facts["ties"],
        "sampling_tests": {**facts["sampling_tests"], "same_seed": result.law.same_seed, "repeats": result.law.repeats},
        "unasked": unasked,
        "no_pass": result.doubts,
    }
    outputs.write(page.rstrip("\n"), content)
    return result.exit_code


@trace.command()
@click.option("--record", is_flag=True, help="The format of the records that `diff` and `bench decode` write.")
def schema(record: bool) -> int:
    """Print the JSON Schema of one line of a trace, or of the parts of a record."""
    from specverify.records.read import schema as of_record
    from specverify.reference.recorded.schema import schema as of_trace
    from specverify.reports.writing import write_json

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
    from specverify.records.merge import merge_records, shards_in
    from specverify.records.read import BENCH, FAILURES, MANIFEST, read
    from specverify.reports.pages.trace import diff_turns, record_head
    from specverify.setup.files import Outputs

    outputs = Outputs(json_file, html_file)
    is_single = (folder / MANIFEST).exists()
    shards = [] if is_single else [shard for shard in shards_in([folder]) if shard != folder]
    record = merge_records(shards) if shards else read(folder)
    failures = sorted(str(file) for place in (folder, *shards) for file in (place / FAILURES).glob("*.json"))
    page = record_head(str(folder), record.manifest, len(record.finished_turns), record.torn, failures)
    figures = {"manifest": record.manifest, "turns": record.finished_turns, "failures": failures, "torn": record.torn}
    code = 3 if record.manifest.get("missing") else 0
    if record.manifest["kind"] == BENCH:
        from specverify.bench.decode_figures import report_decode
        from specverify.bench.decode_record import measurements_of

        if record.finished_turns:
            content, bench_page, _ = report_decode(measurements_of(record))
            figures |= content
            page += "\n" + bench_page
    else:
        page += diff_turns(record.finished_turns)

    def html_page() -> bytes:
        from specverify import __version__
        from specverify.reports.html.bench import record_page

        return record_page(str(folder), figures, __version__)

    outputs.write(page.rstrip("\n"), figures, html_page)
    return code


@trace.command()
@click.argument("folders", metavar="DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", required=True, metavar="DIR", type=click.Path(path_type=Path), help="The folder to write.")
def merge(folders: tuple[Path, ...], out: Path) -> int:
    """Put the whole shards in DIR... together as one record, and say which are missing.

    A DIR is a shard, or the folder of a run that holds shards. Exit codes: 0, or 3 where a shard is missing.
    """
    from specverify.records.merge import merge_records, shards_in, write

    record = merge_records(shards_in(folders))
    write(record, out)
    missing = record.manifest.get("missing", [])
    click.echo("\n".join([f"{out}: {len(record.finished_turns)} turns", *missing]))
    return 3 if missing else 0


@trace.command()
@click.argument("first", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("second", metavar="DIR", type=click.Path(path_type=Path))
@ALPHA
@click.option("--json", "json_file", metavar="FILE|-", help="Write the comparison as one JSON object.")
def compare(first: Path, second: Path, alpha: float, json_file: str | None) -> int:
    """Compare two records turn by turn: tokens, accepted paths and tree sizes must be equal, times may differ.

    Accepted tokens are tested by position, prompt by prompt: a difference of engines whose numbers differ is told from
    chance. Exit codes: 0 equal, 1 a turn differs, 2 unreadable, 3 no turn is in both.
    """
    from specverify.records.read import COMPARED, compare_records, read
    from specverify.reports.acceptance import test_fact
    from specverify.reports.pages.trace import comparison_page
    from specverify.setup.files import Outputs

    outputs = Outputs(json_file)
    comparison = compare_records(read(first), read(second), alpha)
    differ = [
        {**dict(zip(("prompt", "repeat", "way", "place", "batch"), key, strict=True)), "fields": names}
        for key, names in comparison.differ.items()
    ]
    acceptance = {way: test_fact(test) for way, test in comparison.acceptance.items()}
    figures = {"compared": COMPARED, **vars(comparison), "differ": differ, "acceptance": acceptance}
    outputs.write(comparison_page(figures).rstrip("\n"), figures)
    return comparison.exit_code
