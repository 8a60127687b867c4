"""The command `replay`: run one saved case again and compare the finding."""

import os
import sys
from dataclasses import asdict
from typing import Any

import click

from specverify.commands import shared_options

SKIP = 125
"""The exit code with which `git bisect run` passes over a revision."""

BISECTED = {"FIXED": 0, "AGREE": 0, "FAILED": 1, "DIFFER": 1}
"""The exit code of each result under `--bisect`; another failure than the saved one says nothing of the saved one."""


@click.command()
@click.argument("file", type=click.Path())
@click.option("--backend", help="Backend to run it on (default: the one it was saved with).")
@shared_options.fault("Plant this catalogue fault first.")
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="DIR|ID",
    help="Where a checkpoint of the case lies: a name in the file alone opens nothing; repeatable.",
)
@click.option(
    "--draft",
    "heads",
    multiple=True,
    metavar="DIR",
    help="Where a draft head of the case lies, as for --model; repeatable.",
)
@shared_options.processors("Admit a logits processor that the case names; repeatable.")
@shared_options.MODE
@shared_options.guards
@shared_options.threads("Threads of a backend on the CPU (default: 1; all cores for a checkpoint).")
@click.option(
    "--bisect",
    is_flag=True,
    help="Exit codes of `git bisect run`: 0 the saved failure is gone, 1 it is there, 125 could not be judged here.",
)
@click.option("--against", help="The reference instead of the NumPy oracle (default: the one it was saved with).")
@shared_options.REFERENCE
@shared_options.json_file("Write the result as one JSON object.")
@shared_options.html_file("Write the result as one HTML page, with pictures.")
def replay(
    *,
    file: str,
    backend: str | None,
    fault: str | None,
    models: tuple[str, ...],
    heads: tuple[str, ...],
    processors: tuple[str, ...],
    mode: str | None,
    against: str | None,
    reference: str | None,
    case_timeout: float | None,
    start_timeout: float,
    threads: int | None,
    memory_limit: int | None,
    bisect: bool,
    json_file: str | None,
    html_file: str | None,
) -> int:
    """Run one saved case again: FAILED (same finding), CHANGED (another), FIXED (none)."""
    from specverify.campaign.replay import replay as run
    from specverify.properties.reference_names import NUMPY
    from specverify.reports import record, writing
    from specverify.reports.counts import residue_rows
    from specverify.reports.layout80 import label_rows
    from specverify.reports.pages import terminal
    from specverify.reports.pages.screen import screen_of
    from specverify.setup.files import Outputs, check_apart
    from specverify.setup.refusals import ABSENT, UNUSABLE

    check_apart({"the saved case": file, "--json": json_file, "--html": html_file})
    outputs = Outputs(json_file, html_file)
    try:
        result = run(
            file,
            backend,
            fault,
            models=models,
            heads=heads,
            names=processors,
            mode=mode,
            against=against,
            reference=reference or NUMPY,
            case_timeout_s=case_timeout,
            start_timeout_s=start_timeout,
            threads=threads or 0,
            memory=memory_limit,
        )
    except (*UNUSABLE, *ABSENT) as why:
        if not bisect:
            raise
        # A revision whose engine cannot be opened says nothing of the failure: git passes over it.
        click.echo(f"specverify: {' '.join(str(why).split())}", err=True)
        return SKIP
    out = sys.stderr if outputs.take_stdout else sys.stdout
    screen = screen_of(out, os.environ)
    pages = "" if result.failure is None else f"{terminal.failure_page(result.failure, width=screen.width)}\n"
    for error in result.internal:
        pages += f"{terminal.internal_lines(error, screen.width)}\n"
    residue = label_rows(residue_rows(result.residue), screen.width) if result.residue else ""
    print(screen.paint(f"{pages}{residue}{result.word}  {result.why}"), file=out)
    if json_file is not None:
        finding = None if result.failure is None else record.failure_fact(result.failure)
        facts: dict[str, Any] = {
            "result": result.word,
            "why": result.why,
            "finding": finding,
            "emulated": result.emulated,
        }
        facts |= {"internal": [record.internal_fact(error) for error in result.internal]} if result.internal else {}
        if result.certified is not None:
            facts |= {"reference": reference, "reference_rows": asdict(result.certified)}
        facts |= {"saved_fault": result.saved_fault, "residue": writing.jsonable([*result.residue])}
        writing.write_json(json_file, facts)
    if html_file is not None:
        from specverify import __version__
        from specverify.reports.html.pages import replay_page
        from specverify.setup.environment import environment

        page = replay_page(result.word, result.why, result.failure, result.emulated, environment(), __version__)
        writing.write_whole(html_file, page)
    return BISECTED.get(result.word, SKIP) if bisect else result.exit_code
