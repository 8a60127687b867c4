"""The printed form of single facts: numbers, lists, coordinates and addresses.

Numbers have three digits, long lists are shortened, and coordinates carry their names.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from specverify.properties.verdict.finding import ASKED_BY, STAGE_UNKNOWN, Finding
from specverify.reference.trace import Stage

HEADLINES = {"agree": "AGREE", "differ": "DIFFER", "unjudged": "COULD NOT JUDGE"}
"""The headline of each outcome of a run."""

TEXT_ALONE = "AGREE on text alone: no speculation was seen"
"""The headline of a run that agrees and in which plain decoding would have agreed as well."""

SHOWN_ITEMS = 6
"""The number of printed items of a longer list."""

LONGEST = 240
"""The most characters of one printed value."""

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
    "channel": "channel {}",
    "position": "position {}",
    "depth": "depth {}",
    "token": "token {}",
    "context": "after {}",
    "block": "the block {}",
    "coin": "coin {}",
    "draws": "{} rounds",
    "tried": "{} drafted tokens",
    "request": "request {}",
    "action": "action {}",
    "side": "{}",
    "variant": "variant {}",
}
"""The wording of each coordinate of `Finding.where`, in printing order; other coordinates follow by their own names."""


LONGEST_CLEAN = 4000
"""The most characters of a text on one line: an engine may name itself by a megabyte."""


def clean(text: str) -> str:
    """`text` on one line, with joined blanks, and with escapes for characters that are not printable; bounded."""
    return escape(" ".join(text[:LONGEST_CLEAN].split())) + "…" * (len(text) > LONGEST_CLEAN)


def escape(line: str) -> str:
    """`line` with escapes for characters that are not printable, which a terminal may obey and a file may refuse."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in line)


def cut(text: str, longest: int = LONGEST) -> str:
    """`text` cleaned, and shortened with an ellipsis to `longest` characters."""
    line = clean(text)
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


def number(value: float) -> str:
    """A number with three digits; an integer that is not huge is printed in full.

    >>> number(0.000123456), number(12345), number(1234.5), number(float("inf"))
    ('0.000123', '12345', '1234', 'infinite')
    """
    if isinstance(value, int):
        return str(value) if abs(value) < 10**15 else f"about 2^{value.bit_length()}"
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "infinite" if value > 0 else "-infinite"
    # Three digits alone would print 1234.5 as 1.23e+03.
    return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def show(value: Any) -> str:
    """Any expected or observed value in a few words: arrays by shape, long lists by their first items and length."""
    return cut(_value_words(value))


def expected_and_observed(finding: Finding) -> tuple[str, str]:
    """The expected and the observed value, as `show` tells them, or the entries in which they differ.

    Unequal numbers have digits enough to differ. Lists and arrays that would be printed alike are told by the entries
    that differ, each with its index.
    """
    pair = (finding.expected, finding.observed)
    texts = (show(pair[0]), show(pair[1]))
    if texts[0] != texts[1]:
        return texts
    if all(isinstance(value, float) and math.isfinite(value) for value in pair):
        return _apart(*pair)
    return _differing_entries(*pair) or texts


def _apart(expected: float, observed: float) -> tuple[str, str]:
    """Two numbers with digits enough to differ, if they do."""
    texts = (number(expected), number(observed))
    for digits in range(4, 18):
        if texts[0] != texts[1]:
            break
        texts = (f"{expected:.{digits}g}", f"{observed:.{digits}g}")
    return texts


def _differing_entries(expected: Any, observed: Any) -> tuple[str, str] | None:
    """The entries of two lists or arrays that differ: `[4] 0.5, [7] 0.1`; None where no entry does."""
    pairs = list(_entries(expected, observed, ()))
    if not pairs:
        return None
    shown_pairs = pairs[:SHOWN_ITEMS]
    remark = f", … {len(pairs)} entries differ" if len(pairs) > len(shown_pairs) else ""
    columns: tuple[list[str], list[str]] = ([], [])
    for place, due, actual in shown_pairs:
        is_number = all(isinstance(value, float) and math.isfinite(value) for value in (due, actual))
        texts = _apart(due, actual) if is_number else (_value_words(due), _value_words(actual))
        for column, text in zip(columns, texts, strict=True):
            column.append(f"[{', '.join(map(str, place))}] {text}")
    return cut(", ".join(columns[0]) + remark), cut(", ".join(columns[1]) + remark)


def _entries(expected: Any, observed: Any, place: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Any, Any]]:
    """Index, expected and observed value of every leaf in which two nested lists or arrays of one shape differ."""
    pair = [value.tolist() if hasattr(value, "tolist") else value for value in (expected, observed)]
    if all(isinstance(value, (list, tuple)) for value in pair) and len(pair[0]) == len(pair[1]):
        for index, (due, actual) in enumerate(zip(*pair, strict=True)):
            yield from _entries(due, actual, (*place, index))
    elif place and pair[0] != pair[1] and not (pair[0] != pair[0] and pair[1] != pair[1]):  # NaN is not unequal to NaN
        yield place, pair[0], pair[1]


def _value_words(value: Any) -> str:
    """`value` in words, before it is shortened to one line."""
    if value is None:
        return "none"
    if isinstance(value, Stage):
        return value.word
    # Before the numbers, because a bool is an int in Python.
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return number(value)
    if isinstance(value, str):
        return value
    # NumPy arrays and torch tensors, told by their attributes: this package imports no torch.
    if hasattr(value, "tolist") and hasattr(value, "shape"):
        if value.ndim == 0:
            return _value_words(value.item())
        if value.ndim == 1:
            return _list_words(list(value[:SHOWN_ITEMS]), len(value), "[]")
        return f"{value.dtype} array of {' × '.join(str(size) for size in value.shape)}"
    if isinstance(value, dict):
        items = [f"{key}: {_value_words(item)}" for key, item in list(value.items())[:SHOWN_ITEMS]]
        return _join(items, len(value), "{}")
    if isinstance(value, (list, tuple)):
        return _list_words(list(value[:SHOWN_ITEMS]), len(value), "[]")
    if isinstance(value, (set, frozenset)):
        return _list_words(sorted(value, key=str)[:SHOWN_ITEMS], len(value), "{}")
    return str(value)


def _list_words(items: list[Any], length: int, brackets: str) -> str:
    """The items of a list of `length` items, of which `items` are shown."""
    return _join([_value_words(item) for item in items], length, brackets)


def _join(items: list[str], length: int, brackets: str) -> str:
    """Printed items in brackets, with the full length where some are left out."""
    suffix = f", … {length} in all" if length > len(items) else ""
    return f"{brackets[0]}{', '.join(items)}{suffix}{brackets[1]}"


def coordinate(name: str, value: Any) -> str:
    """One coordinate in words, such as `layer 1` or `draft cache`."""
    pattern = PLACES.get(name)
    return cut(pattern.format(_value_words(value)) if pattern else f"{name} {_value_words(value)}", 60)


def coordinate_words(where: dict[str, Any], without: frozenset[str] = frozenset()) -> str:
    """All coordinates except those in `without`, in the order of PLACES: `layer 1, head 0, node 2`."""
    names = [name for name in PLACES if name in where]
    # A sentence names the invariant that asked for a further run.
    names += [name for name in where if name not in (*PLACES, ASKED_BY)]
    return ", ".join(coordinate(name, where[name]) for name in names if name not in without)


def address(finding: Finding) -> str:
    """The address of a finding: stage, step and coordinates."""
    if finding.where.get("side") == STAGE_UNKNOWN:
        coordinates = coordinate_words(finding.where, without=frozenset({"side"}))
        return f"a stage that is not known, step {finding.step}{', ' if coordinates else ''}{coordinates}"
    coordinates = coordinate_words(finding.where)
    return f"stage {finding.stage.word}, step {finding.step}{', ' if coordinates else ''}{coordinates}"


def excess(finding: Finding) -> str:
    """The factor by which a measured finding exceeds its threshold; empty for a finding of an equality."""
    return "" if finding.measure is None else f"{number(float(finding.measure))} times what is allowed"


def plural(count: int, noun: str) -> str:
    """The noun with its number: `1 node`, `2 nodes`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def outside(excluded: Sequence[str]) -> str:
    """The regions that a declaration leaves out, such as `top_p, windows`; empty if there are none.

    Args:
        excluded: `Declaration.excluded`, sentences `region: why`.
    """
    return ", ".join(cut(sentence.partition(": ")[0], 60) for sentence in excluded)
