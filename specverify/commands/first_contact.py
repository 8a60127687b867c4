"""The command `first-contact`: the first minutes on a machine with a new device."""

from pathlib import Path

import click


@click.command()
@click.option("--device", type=click.Choice(["cuda", "npu"]), required=True, help="The device of this machine.")
@click.option(
    "--into",
    type=click.Path(path_type=Path),
    default=Path(".specverify/first-contact"),
    show_default=True,
    help="Folder of the parts and of page.txt; parts that it holds are not run again.",
)
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    default=10.0,
    show_default=True,
    help="Begin no further part, case or launch after so many minutes.",
)
def first_contact(device: str, into: Path, minutes: float) -> int:
    """Ask a new device what tells most in the fewest minutes, and write it as it goes.

    In this order: versions and schemas, our kernels, ten drawn cases of every backend, forwards, a head beside the
    target alone, ways of attention, forwards by tree, batch and context, the shipped tests in miniature, thirty further
    cases of every backend. It may be cut off at any moment; the next run with the same folder goes on, and runs what
    was cut off behind the rest.

    Exit 1 where something differs or failed, 3 where a part has not run.
    """
    from specverify.first_contact.run import run_parts

    return run_parts(device, into, minutes, click.echo)
