"""The page of a first contact: what ran, what differs, what fell back, and what has not run yet."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from specverify.reports.format import clean, plural


class PartResult(Protocol):
    """What a part has told: its state, its seconds, its figures."""

    @property
    def state(self) -> str:
        """`agree`, `differ`, `short`, `absent` or `failed`."""
        ...

    @property
    def seconds(self) -> float:
        """How long it took."""
        ...

    @property
    def figures(self) -> dict[str, Any]:
        """What it found."""
        ...


def first_contact_page(device: str, parts: Sequence[tuple[str, str, PartResult | None]]) -> str:
    """The page of the parts on `device`, each with its name, what it tells, and its result, None before it has run."""
    states = Counter(result.state if result is not None else "not run" for _, _, result in parts)
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    lines = [f"first contact on {device}: {plural(len(parts), 'part')}: {counts}", ""]
    for name, description, result in parts:
        if result is None:
            lines.append(f"  {name:26} not run   {description}")
            continue
        lines.append(f"  {name:26} {result.state:8} {result.seconds:7.1f} s  {description}")
        lines += [f"      {clean(line)}" for line in _figure_lines(result.figures)]
    return "\n".join(lines) + "\n"


def _figure_lines(figures: dict[str, Any]) -> list[str]:
    """The figures as lines: one for each value, and one for each entry of a list."""
    lines: list[str] = []
    for name, value in figures.items():
        if isinstance(value, list):
            lines += [f"{name}: {_words(entry)}" for entry in value]
        elif value not in ({}, None):
            lines.append(f"{name}: {_words(value)}")
    return lines


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_words(entry)}" for name, entry in value.items() if entry not in ({}, None))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
