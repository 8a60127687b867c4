"""Options that take a list of numbers."""

import click


def numbers(context: click.Context, option: click.Parameter, value: str | None) -> tuple[int, ...]:
    """The ascending numbers of a list such as `1,4,16`; none where the option is not given."""
    if value is None:
        return ()
    parts = [int(part) for part in value.split(",") if part.strip().isdecimal()]
    if len(parts) != len(value.split(",")) or not parts or parts[0] < 1 or parts != sorted(set(parts)):
        raise click.BadParameter(f"{value}: numbers from 1 on, ascending, such as 1,4,16")
    return tuple(parts)
