"""What the benches share: their group, their outputs, and the options that several of them have."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import click

from specverify.commands import shared_options
from specverify.reference.case import DTYPES

DEFAULT = "throughput"
"""The bench that runs where none is named."""


class Bench(click.Command):
    """One bench; for an option of other benches it says which have it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click's own; raises UsageError with the benches that have the option."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as why:
            owners = [name for name, other in _benches(ctx).items() if why.option_name in _spellings(other)]
            if not owners:
                raise
            raise click.UsageError(f"{why.option_name} is for bench {' and '.join(owners)}", ctx) from None


class Benches(click.Group):
    """The benches, of which DEFAULT runs where the command line begins with an option, or is empty."""

    command_class = Bench

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click's own, after the name of the default bench is put where none stands."""
        is_named = bool(args) and (not args[0].startswith("-") or args[0] in self.get_help_option_names(ctx))
        return super().parse_args(ctx, args if is_named else [DEFAULT, *args])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's own; raises UsageError with the names of all benches for an unknown one."""
        if args[0] not in self.commands:
            raise click.UsageError(f"{args[0]!r} is not one of {', '.join(map(repr, self.commands))}", ctx)
        return super().resolve_command(ctx, args)


def _benches(ctx: click.Context) -> Mapping[str, click.Command]:
    """Every bench by name, from the context of one of them."""
    group = ctx.parent.command if ctx.parent is not None else None
    return group.commands if isinstance(group, click.Group) else {}


def _spellings(command: click.Command) -> list[str]:
    """Every spelling of every option of a command."""
    return [spelling for parameter in command.params for spelling in parameter.opts]


def with_outputs(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--json` and `--html` to a bench, which gets its `Outputs` before it measures."""

    @wraps(command)
    def run(*, json_file: str | None, html_file: str | None, **options: Any) -> int:
        from specverify.setup.files import Outputs

        code: int = command(outputs=Outputs(json_file, html_file, options.get("table")), **options)
        return code

    html = shared_options.html_file("Write the figures as one HTML page.")
    return shared_options.json_file("Write the figures as one JSON object.")(html(run))


def plots(kind: str, figures: dict[str, Any]) -> Callable[[], bytes]:
    """The maker of the HTML page of a bench whose figures are plotted."""

    def page() -> bytes:
        from specverify import __version__
        from specverify.reports.html.bench import bench_page  # Jinja is imported only for a page

        return bench_page(kind, figures, __version__)

    return page


def figures_pages(kind: str, figures: dict[str, Any]) -> Callable[[], bytes]:
    """The maker of the HTML page of a bench whose figures are listed."""

    def page() -> bytes:
        from specverify import __version__
        from specverify.reports.html.selftest import figures_page

        sentence = "What checking costs. Times are ratios of what was measured side by side in this run."
        return figures_page(f"Bench: {kind}", sentence, figures, __version__)

    return page


BACKEND = click.option("--backend", default="cpu-eager", show_default=True, help="Backend name or pkg.module:factory.")
CASES = click.option("--cases", type=click.IntRange(min=1), default=200, show_default=True, help="Cases to judge.")
SEED = click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the draws.")
MODEL = click.option("--model", required=True, help="Checkpoint directory, hub id, or builtin:NAME.")
THREADS = click.option("--threads", type=click.IntRange(min=1), help="Threads of torch (default: all cores).")
DTYPE = click.option("--dtype", type=click.Choice(DTYPES), default="float32", show_default=True, help="Working dtype.")
NODES = click.option(
    "--nodes", multiple=True, type=click.IntRange(1, 512), help="Nodes of the trees; repeatable (default: a series)."
)
