"""The command `gate`: a profile's backends judged before a merge."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specverify.commands import shared_options
from specverify.lanes import LANES, MOST_LANES
from specverify.properties.reference_names import NUMPY
from specverify.setup.errors import UnusableInput

if TYPE_CHECKING:  # the profile's imports take a second, which other commands need not pay
    from specverify.gate.profile import Profile

SERVICES = ("github", "gitlab")
"""The services whose CI files `--init` writes."""


@click.command()
@click.option(
    "--profile", "file", type=click.Path(path_type=Path), help="The profile (default: the one that lies here)."
)
@click.option(
    "--init", "service", type=click.Choice(SERVICES), help="Write a profile and the CI file, and run nothing."
)
@click.option("--backend", "backends", multiple=True, help="Only this backend of the profile; repeatable.")
@click.option("--cases", type=click.IntRange(min=1), help="Drawn cases of a backend, in place of the profile's.")
@shared_options.time_budget("Seconds of a backend.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), help="In place of the seed that is new in each run.")
@shared_options.REFERENCE
@shared_options.jobs("Worker processes of a backend.")
@shared_options.threads("Threads of a backend on the CPU (default: 1; for a checkpoint what is faster).")
@click.option("--shard", metavar="I/N", default="1/1", help="Judge the I-th of N parts of the cases.")
@click.option(
    "--lanes",
    type=click.IntRange(1, MOST_LANES),
    metavar="N",
    help=f"Most parts of the cases, for shards and workers together (default: the profile's, or {LANES}).",
)
@click.option("--ray", metavar="ADDRESS", help="Judge on a Ray cluster: auto, HOST:PORT, or local; a rerun goes on.")
@click.option(
    "--shards", type=click.IntRange(1, MOST_LANES), metavar="N", help="Slices on the cluster, or shards for --init."
)
@click.option("--merge", is_flag=True, help="Run nothing: report on the shards whose report FOLDERS follow.")
@click.option("--changed-since", metavar="REF", help="Shorten the run if no file of the profile's paths changed.")
@shared_options.fault("Plant this catalogue fault: the gate must be red.")
@click.option("--report", type=click.Path(path_type=Path), help="Folder for reports, in place of the profile's.")
@shared_options.json_file("Write the result as one JSON object here too.")
@shared_options.html_file("Write the page here too, beside gate.html among the reports.")
@shared_options.verbose("Print the counts of every invariant too.")
@click.option("--schema", type=click.Choice(["profile", "result"]), help="Print a JSON Schema, and run nothing.")
@click.argument("folders", nargs=-1, type=click.Path(path_type=Path))
def gate(
    *,
    file: Path | None,
    service: str | None,
    backends: tuple[str, ...],
    cases: int | None,
    time_budget: float | None,
    seed: int | None,
    reference: str | None,
    jobs: int | None,
    threads: int | None,
    shard: str,
    lanes: int | None,
    ray: str | None,
    shards: int | None,
    merge: bool,
    changed_since: str | None,
    fault: str | None,
    report: Path | None,
    json_file: str | None,
    html_file: str | None,
    verbose: bool,
    schema: str | None,
    folders: tuple[Path, ...],
) -> int:
    """Judge every backend of a profile: known failures and saved bundles first, then the corpus, then new draws.

    With --merge, FOLDERS are the report folders of all shards of a gate; the reports are those of the whole run.
    """
    from specverify.fleet.shards import open_shard
    from specverify.gate import profile as profiles
    from specverify.gate.profile import Wishes
    from specverify.gate.starting import start
    from specverify.reports.writing import as_json
    from specverify.setup.files import Outputs

    if schema is not None:
        from specverify.reports.gate import record

        click.echo(as_json(profiles.schema() if schema == "profile" else record.schema(), indent=1), nl=False)
        return 0
    if service is not None:
        for line in start(Path.cwd(), service, shards or 1):
            click.echo(line)
        return 0
    profile = profiles.load(file if file is not None else profiles.find(Path.cwd().relative_to(Path.cwd())))
    changes = {
        "cases": cases, "time_budget": time_budget, "jobs": jobs, "threads": threads, "lanes": lanes,
        "reference": reference,
    }  # fmt: skip
    profile = replace(profile, **{name: value for name, value in changes.items() if value is not None})  # type: ignore[arg-type]
    if profile.reference != NUMPY and profile.against is not None:
        raise UnusableInput(
            f"--reference {profile.reference} computes the oracle, in whose place {profile.file} puts {profile.against}"
        )
    check_names(profile, fault)
    outputs = Outputs(json_file, html_file)
    from specverify.gate.reporting import run_and_report

    if merge != bool(folders):
        raise click.UsageError(
            "--merge needs the report folders of the shards" if merge else f"{folders[0]}: no --merge"
        )
    if (merge, ray is not None, shard != "1/1").count(True) > 1:
        raise click.UsageError("--merge, --ray and --shard contradict each other: give one of them")
    if shards is not None and ray is None:
        raise click.UsageError("--shards needs --ray or --init; --shard I/N judges one of N parts")
    merged = [open_shard(place) for place in folders]
    wishes = Wishes(backends, seed, _shard(shard), changed_since, fault, ray, shards)
    folder = report if report is not None else profile.folder / profile.reports
    out = sys.stderr if outputs.take_stdout else sys.stdout
    return run_and_report(
        profile,
        wishes,
        folder,
        json_file=json_file,
        out=out,
        variables=os.environ,
        html_file=html_file,
        verbose=verbose,
        merged=merged,
    )


def check_names(profile: "Profile", fault: str | None) -> None:
    """Refuse unknown names of a profile before any worker starts.

    Raises:
        Unknown, UnknownBackend: An invariant, a layout or a backend is unknown.
    """
    from specverify.plan import TRANSFORMERS
    from specverify.setup.processors import admit
    from specverify.setup.selection import check_backend, check_globs, check_layout

    check_globs((*profile.invariants, *profile.floors.reached))
    for layout in profile.layouts:
        check_layout(layout, profile.backends if len(profile.layouts) == 1 else ())
    for name in (*profile.backends, *filter(None, (profile.against,))):
        if name == profile.against == TRANSFORMERS:
            continue
        check_backend(name)
    admit(profile.processors)
    if fault is not None:
        from specverify.setup.subjects import fault_named  # brings torch, which this process needs for nothing else

        fault_named(fault)


def _shard(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal()) or not 1 <= int(number) <= int(count):
        raise click.UsageError(f"--shard {text}: I/N stands here, such as 2/4")
    return int(number), int(count)
