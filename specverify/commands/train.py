"""The commands `train` and `vocabulary`."""

from pathlib import Path
from typing import Any

import click

TEXT = "builtin:humaneval (MIT), builtin:python (Python's own library, PSF), a file or a folder; may be repeated."


@click.command(context_settings={"show_default": True})
@click.argument("kind", type=click.Choice(["eagle3", "eagle1", "medusa"]))
@click.option("--model", required=True, metavar="DIR|builtin:NAME", help="The target checkpoint.")
@click.option("--text", "texts", multiple=True, required=True, metavar="TEXT", help=TEXT)
@click.option("--minutes", type=float, required=True, help="Minutes of the clock, data and earlier parts included.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The head's folder; a killed run resumes.")
@click.option("--cache", type=click.Path(path_type=Path), help="Folder of the target's states.  [default: by digest]")
@click.option("--generate", type=click.IntRange(min=0), default=96, help="Tokens by which the target continues texts.")
@click.option("--vocabulary", type=click.IntRange(min=1), default=4096, help="eagle3: tokens that the head can name.")
@click.option("--vocabulary-file", type=click.Path(path_type=Path), help="eagle3: a file of `specverify vocabulary`.")
@click.option("--steps", type=click.IntRange(1, 7), default=3, help="eagle3: steps of the training-time test.")
@click.option("--layers", type=click.IntRange(1, 3), default=1, help="eagle1, eagle3: decoder layers of the head.")
@click.option(
    "--experts", type=click.IntRange(0, 16), default=0, help="eagle1: experts per layer; 0 for a dense block."
)
@click.option("--experts-per-token", type=click.IntRange(1, 16), default=1, help="eagle1: experts that a row takes.")
@click.option("--irope", is_flag=True, help="eagle1: every second layer without rotary embedding, as in Llama 4.")
@click.option("--online", is_flag=True, help="Run the target beside the head; cache no states. Ends after a round.")
@click.option("--heads", type=click.IntRange(1, 8), default=4, help="medusa: number of heads.")
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), default=1e-3, help="Highest learning rate.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu")
@click.option("--threads", type=click.IntRange(min=0), default=0, help="Threads of torch; 0 for all cores.")
@click.option("--most-steps", type=click.IntRange(min=0), default=0, help="End after so many steps; 0 for any number.")
@click.option("--measures", type=click.IntRange(min=0), default=0, help="Points of the curve; 0 for as time allows.")
@click.option("--seed", type=click.IntRange(min=0), default=0)
@click.option("--json", "json_file", metavar="FILE|-", help="Write the figures as one JSON object.")
@click.option("--html", "html_file", metavar="FILE", help="Write the figures and the curve as one HTML page.")
def train(
    *,
    kind: str,
    model: str,
    texts: tuple[str, ...],
    minutes: float,
    out: Path,
    cache: Path | None,
    generate: int,
    device: str,
    threads: int,
    json_file: str | None,
    html_file: str | None,
    **options: Any,
) -> int:
    """Train a draft head for a checkpoint: EAGLE-3, EAGLE-1 or Medusa heads.

    The target continues the texts, its hidden states are cached on disk (or made beside the head, with --online), and
    the head learns the target's law from them. A rehearsal on a few tokens comes first, and refuses what cannot be
    trained. Prompts of the first text are held out; the acceptance on them is shown as the head learns. The head in
    --out has the published layout. Ctrl-C keeps the best head; the same command goes on after a kill. With several
    devices: `torchrun --nproc-per-node N -m specverify train ...`.
    """
    from specverify.isolation.usable_cores import usable_cores
    from specverify.setup.files import Outputs
    from specverify.training.plan import TrainingPlan

    plan = TrainingPlan(
        kind,
        model,
        texts,
        minutes,
        out,
        cache,
        generate,
        device=device,
        threads=threads or usable_cores(),
        **options,
    )
    outputs = Outputs(json_file, html_file)
    from specverify import __version__
    from specverify.training.run import train as run
    from specverify.training.watch import page

    figures = run(plan)

    def html_page() -> bytes:
        from specverify.reports.html.training import training_page  # Jinja is imported only for a page

        return training_page(figures, __version__)

    if figures:
        outputs.write(page(figures), figures, html_page)
    return 0


@click.command(context_settings={"show_default": True})
@click.option("--model", required=True, metavar="DIR|builtin:NAME", help="The target checkpoint.")
@click.option("--text", "texts", multiple=True, required=True, metavar="TEXT", help=TEXT)
@click.option("--size", type=click.IntRange(min=1), default=4096, help="Tokens that a draft can name.")
@click.option("--json", "json_file", metavar="FILE|-", help="Write the figures as one JSON object.")
def vocabulary(model: str, texts: tuple[str, ...], size: int, json_file: str | None) -> int:
    """Choose the tokens that a draft can name: the ones that texts use most.

    Writes a file with the offsets `d2t` (target id less draft id) and the mask `t2d`, for `train --vocabulary-file`;
    the file bears the digest of what it follows from, and is not made twice.
    """
    from specverify.setup.files import Outputs
    from specverify.training.vocabulary import make_vocabulary

    outputs = Outputs(json_file)
    facts = make_vocabulary(model, texts, size)
    line = (
        f"{facts['file']}: {facts['size']} of {facts['total']} ids, {facts['covered']:.2%} of {facts['tokens']} tokens"
        f" ({facts['held_out']:.2%} of held-out text)"
    )
    outputs.write(line, facts)
    return 0
