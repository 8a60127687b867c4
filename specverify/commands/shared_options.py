"""Options that several commands have, each declared once; each command words its own help."""

from collections.abc import Callable
from typing import Any

import click

from specverify.backends.flags import MODES
from specverify.properties.paired_acceptance import ALPHA as DEFAULT_ALPHA
from specverify.properties.reference_names import REFERENCES

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def json_file(help_text: str) -> Decorator:
    """`--json`, the argument `json_file`."""
    return click.option("--json", "json_file", metavar="FILE|-", help=help_text)


def html_file(help_text: str) -> Decorator:
    """`--html`, the argument `html_file`."""
    return click.option("--html", "html_file", metavar="FILE", help=help_text)


def fault(help_text: str) -> Decorator:
    """`--fault`."""
    return click.option("--fault", metavar="NAME", help=help_text)


def processors(help_text: str) -> Decorator:
    """`--processor`, repeatable, the argument `processors`."""
    return click.option("--processor", "processors", multiple=True, metavar="pkg.module:function", help=help_text)


def time_budget(help_text: str) -> Decorator:
    """`--time-budget`, seconds above 0."""
    return click.option("--time-budget", type=click.FloatRange(min=0, min_open=True), metavar="S", help=help_text)


def jobs(help_text: str) -> Decorator:
    """`--jobs`, at least 1."""
    return click.option("--jobs", type=click.IntRange(min=1), help=help_text)


def threads(help_text: str) -> Decorator:
    """`--threads`, at least 1."""
    return click.option("--threads", type=click.IntRange(min=1), help=help_text)


def verbose(help_text: str) -> Decorator:
    """`--verbose`, `-v`."""
    return click.option("--verbose", "-v", is_flag=True, help=help_text)


REFERENCE = click.option(
    "--reference",
    type=click.Choice(REFERENCES),
    help="What computes the oracle: NumPy (default), or torch in float64 on a device, of which NumPy certifies rows.",
)
"""`--reference`; None where it is not given."""

ALPHA = click.option(
    "--alpha",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=DEFAULT_ALPHA,
    show_default=True,
    help="Error rate of the test of accepted tokens.",
)
"""`--alpha`, the same for both commands that compare runs."""

MODE = click.option("--mode", type=click.Choice(MODES), help="reference: eager attention only (default: as flags say).")
"""`--mode`, the same for every command."""


class Size(click.ParamType):  # type: ignore[type-arg]
    """Bytes, written as `8G` or `512MiB`."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number of bytes in `value`; a usage error if `value` is no size."""
        from specverify.isolation.limits import size_of

        try:
            return size_of(str(value))
        except ValueError as why:
            self.fail(str(why), param, ctx)


def guards(command: Any) -> Any:
    """`--case-timeout`, `--start-timeout` and `--memory-limit`, which end the process of a backend."""
    from specverify.isolation.limits import START_S

    command = click.option(
        "--start-timeout",
        type=click.FloatRange(min=0, min_open=True),
        default=START_S,
        metavar="S",
        help=f"End a backend whose engine is not open within S s (default: {START_S:.0f}).",
    )(command)
    command = click.option(
        "--memory-limit",
        type=Size(),
        metavar="SIZE",
        help="End a backend that holds more, such as 8G.",
    )(command)
    return click.option(
        "--case-timeout",
        type=click.FloatRange(min=0, min_open=True),
        metavar="S",
        help="End a backend that gives no answer within S s (default: measured, at least 120).",
    )(command)
