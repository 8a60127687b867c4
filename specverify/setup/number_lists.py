"""Options that take several numbers: a list, or a range."""

import click


def numbers(context: click.Context, option: click.Parameter, value: str | None) -> tuple[int, ...]:
    """The ascending numbers of a list such as `1,4,16`; none where the option is not given."""
    if value is None:
        return ()
    parts = [int(part) for part in value.split(",") if part.strip().isdecimal()]
    if len(parts) != len(value.split(",")) or not parts or parts[0] < 1 or parts != sorted(set(parts)):
        raise click.BadParameter(f"{value}: numbers from 1 on, ascending, such as 1,4,16")
    return tuple(parts)


def layer_range(context: click.Context, option: click.Parameter, value: str | None) -> tuple[int, int] | None:
    """The two numbers of a range such as `4:8`, the first below the second; None where the option is not given."""
    if value is None:
        return None
    first, _, last = value.partition(":")
    if not (first.isdecimal() and last.isdecimal()) or int(first) >= int(last):
        raise click.BadParameter(f"{value}: two numbers from 0 on, the first below the second, such as 4:8")
    return int(first), int(last)
