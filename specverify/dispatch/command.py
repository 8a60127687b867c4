"""The command `dispatch learn`."""

from pathlib import Path

import click


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
    from properties.accepted_ranks import RankCounts
    from reports import writing
    from reports.pages.dispatch import learned_page
    from specverify.dispatch.files import costs_in, counts_in
    from specverify.dispatch.lengths import rates_of
    from specverify.dispatch.table import rows, table, table_json
    from specverify.setup.errors import MissingInput

    writing.check(out)
    found: dict[str, RankCounts] = {}
    for path in results:
        for tag, counts in counts_in(path, kind).items():
            found[tag] = found.get(tag, RankCounts()) + counts
    if not found:
        named = f" of a draft {kind}" if kind else ""
        raise MissingInput(f"no step{named} in {', '.join(map(str, results))} shows its tree and its accepted nodes")
    if len(found) > 1:
        raise click.UsageError(f"counts of {', '.join(sorted(found))}: name one of them with --draft")
    ((tag, counts),) = found.items()
    chosen = rows(rates_of(counts), costs_in(costs))
    steps = sum(offered for (depth, rank), offered in counts.offered.items() if (depth, rank) == (1, 0))
    click.echo(
        learned_page(tag, steps, [(row.batch, row.tree, row.tokens, row.per_time) for row in chosen]), err=out == "-"
    )
    writing.write_json(out, table_json(table(chosen)))
    return 0
