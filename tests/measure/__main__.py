"""Measures this project itself, for those who change it: `python -m tests.measure --help` lists the measures.

Nothing here judges an engine of a user: these commands say how well our own invariants, draws and sampling tests do.
"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

from specverify.campaign import threads

threads.set_one_thread()


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Measure the checks themselves: what they catch, what cases they draw, how often they cry wolf."""


@cli.command()
@click.option("--tests", type=click.IntRange(min=1), default=10_000, show_default=True, help="Black-box tests to run.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--json", "json_file", metavar="FILE|-", help="Write the figures as one JSON object.")
@click.option("--html", metavar="FILE", help="Write the figures as one HTML page.")
def calibration(tests: int, seed: int, json_file: str | None, html: str | None) -> int:
    """Run sampling tests of correct samplers, which must not raise an alarm; exit 1 if one does."""
    from tests.measure.calibration import calibrate
    from tests.measure.pages import calibration_table
    from tests.measure.stream_calibration import calibrate_streams

    streams = calibrate_streams(max(2, tests // 2), seed=seed)
    figures = calibrate(tests, seed) | {"streams": streams}
    figures["red"] = figures["red"] or streams["red"] > 0
    return _write_figures(figures, calibration_table(figures), json_file, html)


@cli.command()
@click.argument("report", type=click.Path(path_type=Path))
def seconds(report: Path) -> int:
    """Write which tests are costly, from the report of `pytest -n 2 --junitxml REPORT`; CI runs those in turn."""
    from tests import rotation

    if not report.is_file():
        raise click.UsageError(f"{report}: there is no such file; `pytest -n 2 --junitxml {report}` writes it")
    rotation.RECORD.write_text(json.dumps(rotation.costly_functions(report), indent=0) + "\n")
    return 0


@cli.command("types")
def types_() -> int:
    """Try plain transformers as the reference on a tiny model of every type that transformers knows, and write it."""
    from tests.measure.model_types import try_every_type

    try_every_type(click.echo)
    return 0


@cli.command()
@click.option("--prompts", type=click.IntRange(min=1), default=5, show_default=True, help="Of each config and dtype.")
@click.option("--config", "names", multiple=True, help="A published config; repeatable, all if absent.")
@click.option("--dtype", "dtypes", multiple=True, help="Working dtype; repeatable.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Even: published deviation.")
@click.option("--trained", is_flag=True, help="Train the weights on a text first.")
@click.option("--against", is_flag=True, help="Take plain transformers as the reference.")
@click.option("--budget", type=click.FloatRange(min=1), default=float("inf"), help="Begin no config after so many s.")
@click.option("--json", "json_file", metavar="FILE|-", help="Write the figures as one JSON object.")
@click.option("--html", metavar="FILE", help="Write the figures as one HTML page.")
def checkpoints(
    prompts: int,
    names: tuple[str, ...],
    dtypes: tuple[str, ...],
    seed: int,
    trained: bool,
    against: bool,
    budget: float,
    json_file: str | None,
    html: str | None,
) -> int:
    """Judge the right engine on published configs, three cases a prompt; exit 1 if one differs."""
    from tests.measure.checkpoints import DTYPES, measure
    from tests.measure.pages import checkpoints_table

    figures = measure(prompts, names, dtypes or DTYPES, seed, trained, against, budget)
    return _write_figures(figures, checkpoints_table(figures), json_file, html)


@cli.command()
@click.option("--cases", type=click.IntRange(min=1), default=200, show_default=True, help="Cases of each dtype.")
@click.option("--backend", default="cpu-eager", show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--json", "json_file", metavar="FILE|-", help="Write the figures as one JSON object.")
@click.option("--html", metavar="FILE", help="Write the figures as one HTML page.")
def control(cases: int, backend: str, seed: int, json_file: str | None, html: str | None) -> int:
    """Measure the law of plain decode's error in each dtype; exit 1 if the right engine seems inexact."""
    from tests.measure.control import measure
    from tests.measure.pages import control_table

    figures = measure(cases, backend, seed)
    return _write_figures(figures, control_table(figures), json_file, html)


@cli.command("gate-time")
@click.option("--prompts", type=click.IntRange(min=1), default=50, show_default=True, help="Greedy, and sampled.")
@click.option("--new-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Of a prompt.")
@click.option("--accepted", type=click.FloatRange(min=0), default=1.0, show_default=True, help="Per step, of the head.")
@click.option("--json", "json_file", metavar="FILE|-", help="Write the figures as one JSON object.")
@click.option("--html", metavar="FILE", help="Write the figures as one HTML page.")
def gate_time(prompts: int, new_tokens: int, accepted: float, json_file: str | None, html: str | None) -> int:
    """Estimate the time of a gate of an 8B model on one H100, from layers and narrow prompts that run here."""
    from tests.measure.gate_time import measure
    from tests.measure.pages import gate_time_table

    figures = measure(prompts, new_tokens, accepted)
    return _write_figures(figures, gate_time_table(figures), json_file, html)


@cli.command()
@click.option("--cases", type=click.IntRange(min=1), default=500, show_default=True, help="Cases of each seed.")
@click.option("--seed", "seeds", type=click.IntRange(min=0), multiple=True, default=(0,), show_default=True)
@click.option("--backend", default="cpu-eager", show_default=True)
@click.option("--json", "json_file", metavar="FILE|-", help="Write the figures as one JSON object.")
@click.option("--html", metavar="FILE", help="Write the figures as one HTML page.")
def pairs(cases: int, seeds: tuple[int, ...], backend: str, json_file: str | None, html: str | None) -> int:
    """Count which pairs of values and events default draws reach, and name those that never met."""
    from tests.measure import pair_search
    from tests.measure.pages import pairs_table

    figures = pair_search.measure(cases, seeds, backend)
    return _write_figures(figures, pairs_table(figures), json_file, html)


@cli.command()
@click.option("--cases", type=click.IntRange(min=1), default=200, show_default=True, help="Cases of each search.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--json", "json_file", metavar="FILE|-", help="Write the figures as one JSON object.")
@click.option("--html", metavar="FILE", help="Write the figures as one HTML page.")
def search(cases: int, seed: int, json_file: str | None, html: str | None) -> int:
    """Count drawn cases until each condition appears under which faults show; nothing is judged."""
    from tests.measure import search_coverage
    from tests.measure.pages import search_table

    figures = search_coverage.measure(cases, seed)
    return _write_figures(figures, search_table(figures), json_file, html)


@cli.command()
@click.argument("results", nargs=-1, type=click.Path(path_type=Path))
@click.option("--cases", type=click.IntRange(min=0), default=0, help="Judge slices until the record has so many cases.")
@click.option("--resume", is_flag=True, help="Go on with a record that has cases.")
@click.option("--record", type=click.Path(path_type=Path), help="The record (default: tests/clean_cases.json).")
@click.option("--merge", "others", type=click.Path(path_type=Path), multiple=True, help="Take a record's slices in.")
@click.option("--backend", "backends", multiple=True, help="Only this backend; repeatable (default: all on the CPU).")
@click.option("--jobs", type=click.IntRange(min=1), default=2, show_default=True, help="Worker processes of `diff`.")
@click.option("--json", "json_file", metavar="FILE|-", help="Write the figures as one JSON object.")
@click.option("--html", metavar="FILE", help="Write the figures as one HTML page.")
def clean(
    results: tuple[Path, ...],
    cases: int,
    resume: bool,
    record: Path | None,
    others: tuple[Path, ...],
    backends: tuple[str, ...],
    jobs: int,
    json_file: str | None,
    html: str | None,
) -> int:
    """Judge default cases of the right engine, over days and machines, into one record; exit 1 if it has a finding.

    RESULTS are files of `diff --keep-going --json FILE`, run with this commit and no other options than --backend,
    --cases, --seed and --jobs. Without --cases, RESULTS and --merge the record is read and nothing runs.
    """
    from tests.measure import clean_cases
    from tests.measure.pages import clean_table

    file = record or clean_cases.RECORD
    slices = clean_cases.read_record(file)
    if slices and cases and not resume:
        raise click.UsageError(f"{file} has {sum(row.cases for row in slices)} cases; --resume goes on with it")
    added = [clean_cases.slice_of_result(result) for result in results]
    for rows in (added, *map(clean_cases.read_record, others)):
        slices = clean_cases.merge(slices, rows)
    if results or others:
        clean_cases.write_record(file, slices)
    chosen = backends or clean_cases.own_backends()

    def keep(row: clean_cases.Slice) -> None:
        slices.append(row)
        clean_cases.write_record(file, slices)
        click.echo(clean_cases.progress(slices, row), err=True)

    try:
        for row in clean_cases.judge_slices(slices, cases, chosen, jobs, clean_cases.judge_slice):
            keep(row)
    except clean_cases.InterruptedSlice as interrupt:
        keep(interrupt.row)
        raise
    figures = clean_cases.figures_of(slices)
    return _write_figures(figures, clean_table(figures), json_file, html)


@cli.command()
@click.argument("patches", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--backend", default="cpu-eager", show_default=True)
@click.option("--cases", type=click.IntRange(min=1), default=500, show_default=True, help="Most cases of each hunt.")
@click.option("--seed", "seeds", type=click.IntRange(min=0), multiple=True, default=(0, 1), show_default=True)
@click.option("--json", "json_file", metavar="FILE|-", help="Write the figures as one JSON object.")
@click.option("--html", metavar="FILE", help="Write the figures as one HTML page.")
def holdout(
    patches: tuple[Path, ...],
    backend: str,
    cases: int,
    seeds: tuple[int, ...],
    json_file: str | None,
    html: str | None,
) -> int:
    """Look by default draws for faults that nobody tuned on: git diffs against the engine, one in each file."""
    from tests.measure.holdout import measure
    from tests.measure.pages import holdout_table

    figures = measure(patches, backend, cases, seeds, partial(click.echo, err=True))
    return _write_figures(figures, holdout_table(figures), json_file, html)


@cli.command()
@click.option("--of", type=click.Choice(["engine", "reference"]), default="engine", show_default=True, help="Whose.")
@click.option("--sample", type=click.IntRange(min=0), default=400, show_default=True, help="How many, 0 for all.")
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Processes.")
@click.option("--budget", type=click.FloatRange(min=1), metavar="S", help="Begin none after S s.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--report",
    type=click.Path(path_type=Path),
    default=Path(".specverify"),
    show_default=True,
    help="Folder of results, taken up again.",
)
@click.option("--json", "json_file", metavar="FILE|-", help="Write the figures as one JSON object.")
@click.option("--html", metavar="FILE", help="Write the figures as one HTML page.")
def mutants(
    of: str,
    sample: int,
    jobs: int,
    budget: float | None,
    seed: int,
    report: Path,
    json_file: str | None,
    html: str | None,
) -> int:
    """Say what share of one-line errors in the engine the invariants catch (in the oracle: its tests).

    Exit 1 below the goal, 3 where not all of them were judged.
    """
    from tests.measure.mutation import bench
    from tests.measure.pages import mutants_page

    options = bench.Options(of, sample, seed, jobs, budget, report)
    figures = bench.bench(options, bench.scope_of(options))
    return _write_figures(figures, mutants_page(figures), json_file, html)


@cli.command()
@click.option("--slow", is_flag=True, help="Run the commands of slow blocks too (minutes).")
@click.option("--page", "names", multiple=True, metavar="PATH", help="Only this page; repeatable.")
def docs(slow: bool, names: tuple[str, ...]) -> int:
    """Write the pages of docs/reference anew, and into all pages the files that they show and what commands print."""
    from tests.measure.documents.writing import write_pages

    for name in write_pages(names, slow):
        click.echo(f"wrote {name}")
    return 0


@cli.command()
def pictures() -> int:
    """Take the pictures of the docs anew; this needs Chromium."""
    from tests.measure.documents.pictures import write_pictures

    for file in write_pictures():
        click.echo(f"wrote {file.relative_to(Path.cwd())} ({file.stat().st_size} bytes)")
    return 0


def _write_figures(figures: dict[str, Any], page: str, json_file: str | None, html: str | None) -> int:
    from specverify import __version__
    from specverify.reports.html.selftest import figures_page
    from specverify.reports.writing import write_json, write_whole

    click.echo(page, err=json_file == "-")
    if json_file is not None:
        write_json(json_file, figures)
    if html is not None:
        name = click.get_current_context().command.name or ""
        write_whole(
            html, figures_page(name.capitalize(), str(click.get_current_context().command.help), figures, __version__)
        )
    return 1 if figures.get("red") else 3 if figures.get("unfinished") else 0


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; what is missing is one line on standard error and exit code 3."""
    from specverify.setup.errors import MissingInput
    from tests.measure.child import raise_on_signals

    raise_on_signals()
    try:
        code = cli.main(args=arguments, prog_name="python -m tests.measure", standalone_mode=False)
    except click.exceptions.Abort:
        code = 3
    except click.ClickException as why:
        why.show()
        code = 2
    except MissingInput as why:
        click.echo(f"tests.measure: {why}", err=True)
        code = 3
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
