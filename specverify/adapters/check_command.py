"""The command `check-adapter`: a handful of cases, with whole tracebacks."""

import faulthandler
import sys
import traceback

import click


@click.command("check-adapter")
@click.argument("backend", metavar="pkg.module:factory")
@click.option("--cases", type=click.IntRange(min=1), default=8, show_default=True, help="Most cases.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the draws.")
def check_adapter(backend: str, cases: int, seed: int) -> int:
    """Open an adapter and judge a handful of cases within its declaration, in this process, tracebacks in full.

    It tells which stages and invariants are reached, what cases never ask, what was declined and why, and what to do
    next. Exit codes: 0 agree, 1 differ, 2 cannot be opened, 3 too little was compared.
    """
    from specverify.adapters.examine import examine
    from specverify.backends.base import Declaration
    from specverify.backends.registry import UnknownBackend
    from specverify.reports.pages.adapter_check import STEPS, case_lines, examination_page

    # A crash of native code ends this process: its stacks are the last that is seen.
    if not faulthandler.is_enabled() and sys.stderr is sys.__stderr__:
        faulthandler.enable()

    def began(declaration: Declaration, count: int) -> None:
        click.echo(
            f"opened        {backend}: {declaration.name} on {declaration.device}; {count} cases within its declaration"
        )

    try:
        examination = examine(backend, cases, seed, began)
    except UnknownBackend as why:
        if why.__cause__ is not None:
            click.echo("".join(traceback.format_exception(why.__cause__)).rstrip("\n"), err=True)
        raise
    for number, examined in enumerate(examination.cases, 1):
        click.echo(case_lines(number, examined.verdict, examined.outcome, examined.traceback))
    outcomes = [(outcome, examination.count(outcome)) for outcome in STEPS]
    summary = examination_page(
        backend, examination.tally, outcomes, examination.never_shown, examination.gains(), examination.never_drawn()
    )
    click.echo(f"\n{summary}".rstrip("\n"))
    return examination.exit_code
