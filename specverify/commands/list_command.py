"""The command `list`: it prints the rows of `specverify.commands.subjects`."""

from typing import Any

import click


@click.command("list")
@click.argument(
    "subject",
    required=False,
    type=click.Choice(
        ["backends", "layouts", "invariants", "faults", "catalogue", "models", "families", "rules", "trees"]
    ),
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_(subject: str | None, as_json: bool) -> int:
    """List backends, KV layouts, invariants, faults, reports, models, families, rules, kinds of tree."""
    from specverify.commands.subjects import SUBJECTS, rows_of
    from specverify.reports.pages.tables import rows_table
    from specverify.reports.writing import write_json

    chosen = [subject] if subject else list(SUBJECTS)
    content: Any = {name: rows_of(name) for name in chosen}
    if as_json:
        write_json("-", content[subject] if subject else content)
        return 0
    for name in chosen:
        click.echo(rows_table(name, content[name]))
    return 0
