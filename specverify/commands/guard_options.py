"""The options that bound one answer of a backend's process: its time and its memory."""

from typing import Any

import click


class Size(click.ParamType):  # type: ignore[type-arg]
    """Bytes, written as `8G` or `512MiB`."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number of bytes; a usage error where `value` is no size."""
        from specverify.isolation.limits import size_of

        try:
            return size_of(str(value))
        except ValueError as why:
            self.fail(str(why), param, ctx)


def options(command: Any) -> Any:
    """The options that bound one answer of a backend's process."""
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
