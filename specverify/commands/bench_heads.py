"""The command `bench heads`: EAGLE-1 heads of several shapes, trained alike and compared."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from specverify.commands.bench_options import MODEL, SEED, Bench, with_outputs

if TYPE_CHECKING:
    from specverify.setup.files import Outputs


@click.command(cls=Bench, context_settings={"show_default": True})
@MODEL
@click.option("--text", "texts", multiple=True, required=True, metavar="TEXT", help="As for `train`; repeatable.")
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="Folder of the heads; a killed run resumes."
)
@click.option("--steps", type=click.IntRange(min=1), default=400, help="Steps of each training.")
@click.option("--layers", multiple=True, type=click.IntRange(1, 3), default=(1, 2, 3), help="Layers; repeatable.")
@click.option(
    "--feed-forward",
    multiple=True,
    type=click.Choice(["dense", "experts"]),
    default=("dense", "experts"),
    help="Blocks; repeatable.",
)
@click.option(
    "--positions",
    multiple=True,
    type=click.Choice(["rope", "irope"]),
    default=("rope", "irope"),
    help="Rotary embedding in every layer, or in every other one; repeatable.",
)
@click.option("--measures", type=click.IntRange(min=1), default=8, help="Points of each curve after the first.")
@click.option(
    "--minutes", type=click.FloatRange(min=0, min_open=True), default=60.0, help="Most minutes of a training."
)
@click.option("--generate", type=click.IntRange(min=0), default=96, help="Tokens by which the target continues texts.")
@click.option("--threads", type=click.IntRange(min=0), default=0, help="Threads of torch; 0 for all cores.")
@SEED
@with_outputs
def heads(
    *,
    model: str,
    texts: tuple[str, ...],
    out: Path,
    steps: int,
    layers: tuple[int, ...],
    feed_forward: tuple[str, ...],
    positions: tuple[str, ...],
    measures: int,
    minutes: float,
    generate: int,
    threads: int,
    seed: int,
    outputs: "Outputs",
) -> int:
    """Train EAGLE-1 heads of each shape alike, and compare acceptance: layers x feed-forward x iRoPE, and curves."""
    from specverify.bench.heads import GridPlan, measure, shapes
    from specverify.isolation.usable_cores import usable_cores
    from specverify.reports.pages.tables import heads_table

    grid = tuple(shapes(layers, feed_forward, positions))
    if not grid:
        raise click.UsageError("--positions irope: a head of one layer has none; ask for --layers 2 or 3")
    plan = GridPlan(model, texts, out, steps, measures, minutes, generate, threads or usable_cores(), seed, shapes=grid)
    figures = measure(plan, lambda line: click.echo(line, err=True))

    def page() -> bytes:
        from specverify import __version__
        from specverify.reports.html.training import heads_page  # Jinja is imported only for a page

        return heads_page(figures, __version__)

    outputs.write(heads_table(figures), figures, page)
    return 0
