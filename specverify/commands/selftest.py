"""The command `selftest`: plant every fault of the catalogue, and find each one."""

from pathlib import Path

import click

from specverify.plan import SELFTEST_S


@click.command()
@click.option("--fault", "globs", multiple=True, metavar="GLOB", help="Only these faults, by name or id; repeatable.")
@click.option("--backend", help="Plant them in this backend or pkg.module:factory (default: each fault's own).")
@click.option(
    "--budget", type=click.FloatRange(min=1), default=SELFTEST_S, show_default=True, metavar="S", help="Seconds."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the draws.")
@click.option("--jobs", type=click.IntRange(min=1), help="Worker processes (default: one per core, up to 4).")
@click.option(
    "--report",
    type=click.Path(path_type=Path),
    default=Path(".specverify"),
    show_default=True,
    help="Folder of results.",
)
@click.option("--json", "json_file", metavar="FILE|-", help="Write the result as one JSON object.")
@click.option("--html", "html_file", metavar="FILE", help="Write the result as one HTML page.")
def selftest(
    *,
    globs: tuple[str, ...],
    backend: str | None,
    budget: float,
    seed: int,
    jobs: int | None,
    report: Path,
    json_file: str | None,
    html_file: str | None,
) -> int:
    """Plant each fault of the catalogue and search as diff does: a gate that cannot fail proves nothing.

    Exit 1 where a fault escapes, or where something differs in the clean runs between.
    """
    from specverify.selftest import schedule as command
    from specverify.setup.files import Outputs

    options = command.Options(globs, backend, budget, seed, jobs)
    return command.selftest(options, Outputs(json_file, html_file), report)
