"""The commands `dispatch learn` and `dispatch costs`."""

from pathlib import Path

import click

from specverify.setup.number_lists import numbers


@click.group()
def dispatch() -> None:
    """Tables of static trees by batch size."""


@dispatch.command()
@click.argument("results", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--costs",
    required=True,
    type=click.Path(path_type=Path),
    help='Times of a step by batch size and number of nodes: {"1": {"1": 10.2, "8": 11.0}}.',
)
@click.option("--draft", "kind", metavar="KIND", help="Count this kind of draft alone: model, eagle3, medusa, ...")
@click.option("--out", required=True, metavar="FILE|-", help="Write the table, as `shape` of a draft in a case file.")
def learn(results: tuple[Path, ...], costs: Path, kind: str | None, out: str) -> int:
    """Learn a table from RESULTS, files results.jsonl of `diff` or recorded traces, which count accepted nodes.

    For each batch size of --costs the tree that is expected to emit most tokens in the time of its step.
    """
    from specverify.dispatch.files import costs_in, counts_in
    from specverify.dispatch.table import rates_of, rows, table, table_json
    from specverify.properties.accepted_ranks import RankCounts
    from specverify.reports import writing
    from specverify.reports.pages.tables import learned_page
    from specverify.setup.errors import MissingInput

    writing.check_writable(out)
    counts_by_kind: dict[str, RankCounts] = {}
    for path in results:
        for tag, counts in counts_in(path, kind).items():
            counts_by_kind[tag] = counts_by_kind.get(tag, RankCounts()) + counts
    if not counts_by_kind:
        named = f" of a draft {kind}" if kind else ""
        raise MissingInput(f"no step{named} in {', '.join(map(str, results))} shows its tree and its accepted nodes")
    if len(counts_by_kind) > 1:
        raise click.UsageError(f"counts of {', '.join(sorted(counts_by_kind))}: name one of them with --draft")
    ((tag, counts),) = counts_by_kind.items()
    chosen = rows(rates_of(counts), costs_in(costs))
    steps = sum(offered for (depth, rank), offered in counts.offered.items() if (depth, rank) == (1, 0))
    click.echo(
        learned_page(tag, steps, [(row.batch, row.tree, row.tokens, row.per_time) for row in chosen]), err=out == "-"
    )
    writing.write_json(out, table_json(table(chosen)))
    return 0


@dispatch.command()
@click.option("--model", required=True, help="Checkpoint directory, hub id, or builtin:NAME.")
@click.option("--backend", default="cpu-eager", show_default=True, help="One of our engines.")
@click.option("--batches", default="1,2,4,8", show_default=True, callback=numbers, help="Numbers of requests.")
@click.option("--nodes", default="1,4,8,16,32", show_default=True, callback=numbers, help="Numbers of nodes.")
@click.option("--prefix", default=128, show_default=True, type=click.IntRange(min=2), help="Tokens of each prompt.")
@click.option("--steps", default=5, show_default=True, type=click.IntRange(min=1), help="Steps timed for each pair.")
@click.option("--out", required=True, metavar="FILE|-", help="Write the times, as `learn --costs` reads them.")
def costs(
    *,
    model: str,
    backend: str,
    batches: tuple[int, ...],
    nodes: tuple[int, ...],
    prefix: int,
    steps: int,
    out: str,
) -> int:
    """Measure the target's verify forward by batch size and number of nodes, in seconds.

    The forwards of a draft, and what lies between forwards, are not in these times: add them where they matter.
    """
    from specverify.backends.base import Serving
    from specverify.campaign.threads import for_checkpoint
    from specverify.checkpoints.opening import open_checkpoint
    from specverify.dispatch.measure import forward_seconds
    from specverify.plan import default_dtypes
    from specverify.reports import writing
    from specverify.setup.subjects import open_planted

    writing.check_writable(out)
    click.get_current_context().with_resource(for_checkpoint())
    target, opened = open_checkpoint(model), open_planted(backend, None)
    if not isinstance(opened, Serving):
        raise click.UsageError(f"--backend {backend} plays no sessions: one of our engines is needed")
    dtype = default_dtypes(backend)[0]
    times: dict[str, dict[str, float]] = {}
    for batch in batches:
        for count in nodes:
            seconds = forward_seconds(opened, target, batch=batch, nodes=count, prefix=prefix, steps=steps, dtype=dtype)
            times.setdefault(str(batch), {})[str(count)] = seconds
            click.echo(f"batch {batch}, {count} nodes: {seconds:.4g} s", err=True)
    writing.write_json(out, times)
    return 0
