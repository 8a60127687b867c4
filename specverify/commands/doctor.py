"""The command `doctor`: installed, missing and shadowed packages, or a probe."""

import click


@click.command()
@click.option("--probe", type=click.Choice(["ascend"]), help="Run the operators' contract on the device instead.")
@click.option("--open", "opening", is_flag=True, help="Open every backend, which imports its engine (seconds).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(probe: str | None, opening: bool, as_json: bool) -> int:
    """Say what is installed, what is missing, what is shadowed. Exit 3 if something needed is not there.

    With --probe, say which documented rules of the device's operators hold on it: exit 1 if one does not.
    """
    from specverify.commands.doctor_checks import examine, healthy
    from specverify.reports.pages.tables import rows_table
    from specverify.reports.writing import write_json

    if probe is not None:
        from specverify.commands.doctor_checks import probe_rows

        rule_rows = probe_rows()
        if as_json:
            write_json("-", {"probe": probe, "rules": rule_rows})
        else:
            click.echo(rows_table(f"probe {probe}", rule_rows))
        return 1 if any(row["state"] == "struck" for row in rule_rows) else 0
    rows = examine(opening)
    if as_json:
        write_json("-", {"healthy": healthy(rows), "checks": rows})
    else:
        click.echo(rows_table("doctor", rows))
    return 0 if healthy(rows) else 3
