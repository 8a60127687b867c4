"""The options `--case-timeout` and `--memory-limit` for a backend's process."""

from typing import Any

import click


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


def options(command: Any) -> Any:
    """Add the two options to a click command."""
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
