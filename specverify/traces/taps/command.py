"""The command `trace tap`."""

import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import click

from specverify.setup.errors import UnusableInput
from specverify.traces.taps.tapping import ENGINES

TAPPING_FIRST: dict[str, tuple[str, ...]] = {
    "vllm": (),
    "transformers": ("-m", "specverify.traces.taps.script"),
    "llama.cpp": ("-m", "specverify.traces.taps.script"),
}
"""Arguments before a Python file: vLLM's processes load the tap as a plug-in, others are tapped before it runs."""


@click.command()
@click.argument("engine", type=click.Choice(tuple(ENGINES)))
@click.option("--out", "file", required=True, metavar="FILE", help="The trace to write; runs are appended.")
@click.option("--stages", is_flag=True, help="Write the target's logits and the proposals of drafts too.")
@click.option(
    "--share",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    show_default=True,
    help="Record this share of the requests.",
)
@click.argument("script", metavar="SCRIPT")
@click.argument("arguments", metavar="[ARGS]...", nargs=-1, type=click.UNPROCESSED)
def tap(*, engine: str, file: str, stages: bool, share: float, script: str, arguments: tuple[str, ...]) -> int:
    """Run SCRIPT, and write what ENGINE does in it as a trace for `trace check`.

    SCRIPT is a Python file, or for vLLM any program, such as `vllm serve DIR`. Processes that it starts record too.

    Exit codes: that of SCRIPT, or 3 where it ended with 0 and no run was recorded.
    """
    from specverify.reports.pages.trace import tap_page
    from specverify.traces.taps.recorder import LEFT_OUT
    from specverify.traces.taps.tapping import environment_of, settings_for

    settings = settings_for(engine, file, stages, share)
    left_out = Path(settings.file + LEFT_OUT)
    left_out.unlink(missing_ok=True)
    runs_before = _runs_in(settings.file)
    program = [sys.executable, *TAPPING_FIRST[engine], script] if script.endswith(".py") else [script]
    with tempfile.TemporaryDirectory(prefix="specverify-tap-") as folder:
        variables = {**os.environ, **environment_of(settings, folder)}
        try:
            done = subprocess.run([*program, *arguments], env=variables, check=False)
        except OSError as why:
            raise UnusableInput(f"{script}: cannot be run ({why.strerror or why})") from None
    runs = _runs_in(settings.file) - runs_before
    reasons = Counter(left_out.read_text().splitlines()) if left_out.exists() else Counter()
    left_out.unlink(missing_ok=True)
    click.echo(tap_page(file, runs, reasons))
    return done.returncode or (0 if runs else 3)


def _runs_in(file: str) -> int:
    """The number of runs in a trace."""
    with Path(file).open() as lines:
        return sum(line.startswith('{"run"') for line in lines)
