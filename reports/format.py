"""How a single fact is printed: numbers to three digits, long lists elided, coordinates with their names."""

import math
from typing import Any

from properties.verdict.finding import STAGE_UNKNOWN, Finding
from reference.trace import Stage

SHOWN_ITEMS = 6
"""Items of a longer list that are printed."""

LONGEST = 240
"""Characters of one printed value."""

PLACES = {
    "cache": "{} cache",
    "kind": "{}",
    "layer": "layer {}",
    "head": "head {}",
    "node": "node {}",
    "row": "row {}",
    "column": "column {}",
    "cause": "{}",
    "slot": "slot {}",
    "position": "position {}",
    "depth": "depth {}",
    "token": "token {}",
    "context": "after {}",
    "block": "the block {}",
    "coin": "coin {}",
    "draws": "{} rounds",
    "request": "request {}",
    "action": "action {}",
    "side": "{}",
    "variant": "variant {}",
}
"""How each coordinate of `Finding.where` is read aloud, in the order in which they are; others follow by name."""


def clean(text: str) -> str:
    """`text` on one line: blanks joined, what is not printable as its escape."""
    return escaped(" ".join(text.split()))


def escaped(line: str) -> str:
    """`line` with the escapes of what is not printable, so that no terminal obeys it and no file refuses it."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in line)


def cut(text: str, longest: int = LONGEST) -> str:
    """`text` cleaned, and cut with an ellipsis where it is longer than `longest` characters."""
    line = clean(text)
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


def number(value: float) -> str:
    """A number as a reader takes it in: three digits; whole and not huge ones in full.

    >>> number(0.000123456), number(12345), number(1234.5), number(float("inf"))
    ('0.000123', '12345', '1234', 'infinite')
    """
    if isinstance(value, int):
        return str(value) if abs(value) < 10**15 else f"about 2^{value.bit_length()}"
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "infinite" if value > 0 else "-infinite"
    return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def show(value: Any) -> str:
    """Any expected or observed value in a few words: arrays by shape, long lists by their first items and length."""
    return cut(_shown(value))


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, Stage):
        return value.word
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return number(value)
    if isinstance(value, str):
        return value
    if hasattr(value, "tolist") and hasattr(value, "shape"):
        if value.ndim == 0:
            return _shown(value.item())
        if value.ndim == 1:
            return _listed(list(value[:SHOWN_ITEMS]), len(value), "[]")
        return f"{value.dtype} array of {' × '.join(str(size) for size in value.shape)}"
    if isinstance(value, dict):
        items = [f"{key}: {_shown(item)}" for key, item in list(value.items())[:SHOWN_ITEMS]]
        return _joined(items, len(value), "{}")
    if isinstance(value, (list, tuple)):
        return _listed(list(value[:SHOWN_ITEMS]), len(value), "[]")
    if isinstance(value, (set, frozenset)):
        return _listed(sorted(value, key=str)[:SHOWN_ITEMS], len(value), "{}")
    return str(value)


def _listed(items: list[Any], length: int, brackets: str) -> str:
    return _joined([_shown(item) for item in items], length, brackets)


def _joined(items: list[str], length: int, brackets: str) -> str:
    rest = f", … {length} in all" if length > len(items) else ""
    return f"{brackets[0]}{', '.join(items)}{rest}{brackets[1]}"


def coordinate(name: str, value: Any) -> str:
    """One coordinate in words, such as `layer 1` or `draft cache`."""
    pattern = PLACES.get(name)
    return cut(pattern.format(_shown(value)) if pattern else f"{name} {_shown(value)}", 60)


def places(where: dict[str, Any], without: frozenset[str] = frozenset()) -> str:
    """All coordinates but those in `without`, in the order of PLACES: `layer 1, head 0, node 2`."""
    named = [name for name in PLACES if name in where] + [name for name in where if name not in PLACES]
    return ", ".join(coordinate(name, where[name]) for name in named if name not in without)


def address(finding: Finding) -> str:
    """Where a finding lies: stage, step, and its coordinates."""
    if finding.where.get("side") == STAGE_UNKNOWN:
        rest = places(finding.where, without=frozenset({"side"}))
        return f"a stage that is not known, step {finding.step}{', ' if rest else ''}{rest}"
    rest = places(finding.where)
    return f"stage {finding.stage.word}, step {finding.step}{', ' if rest else ''}{rest}"


def excess(finding: Finding) -> str:
    """How far beyond its threshold a measured finding lies, or nothing for one that asks for equality."""
    return "" if finding.measure is None else f"{number(float(finding.measure))} times what is allowed"


def plural(count: int, noun: str) -> str:
    """The noun with its number: `1 node`, `2 nodes`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
