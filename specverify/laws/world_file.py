"""Reading of a world from a JSON file: target and draft by path of tokens.

Every unknown or malformed field is refused with its path in the file.
"""

import json
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from specverify.laws.world_options import LONGEST, Tables, exact_number, fitting_tokens, probabilities, shape_of
from specverify.reference.files.regular import TooLarge, read_whole
from specverify.reference.oracle.acceptance import Row
from specverify.reference.oracle.tree_growth import Path
from specverify.reference.rules import DRAWS, THRESHOLDS
from specverify.reference.tree import Shape
from specverify.setup.errors import UnusableInput

MOST_BYTES = 4_000_000
"""Largest file that is read, in bytes."""

FIELDS = ("parents", "target", "draft", "draws", "tokens", "thresholds")
"""The fields of a world file."""


class Written(str):
    """A decimal, NaN or Infinity in the spelling of the file, so that 0.1 is exactly a tenth."""


@dataclass(frozen=True)
class WrittenWorld:
    """The contents of a world file.

    Attributes:
        tables: Tree and rows.
        draws: One of DRAWS, or None if the file does not say.
        thresholds: The thresholds that the file sets.
    """

    tables: Tables
    draws: str | None
    thresholds: dict[str, Fraction]


def read(name: str) -> WrittenWorld:
    """The world in the file of that name.

    Raises:
        UnusableInput: The file cannot be read, or a field has a wrong value; the message holds the field's path.
    """
    where = f"--world {name}"
    content = _read_json(name, where)
    if not isinstance(content, dict):
        raise UnusableInput(f"{where}: a world is a JSON object, not {_kind(content)}")
    for field in content:
        if field not in FIELDS:
            raise UnusableInput(f"{where}: {field[:LONGEST]!r} is no field of a world (known: {', '.join(FIELDS)})")
    for field in ("parents", "target", *([] if "tokens" in content else ["draft"])):
        if field not in content:
            raise UnusableInput(f"{where}: {field} is missing")
    shape = shape_of(_integers(content["parents"], f"{where}: parents"), f"{where}: parents")
    target = _table(content["target"], shape, None, f"{where}: target")
    vocab = len(target[()])
    # With given tokens the draft's law is not read, and the field may be missing.
    written = content.get("draft", content["target"])
    if isinstance(written, list):
        if not written:
            raise UnusableInput(f"{where}: draft: the list is empty; give at least one draft")
        drafts = [_table(table, shape, vocab, f"{where}: draft[{number}]") for number, table in enumerate(written)]
    else:
        drafts = [_table(written, shape, vocab, f"{where}: draft")]
    tokens = None
    if "tokens" in content:
        tokens = fitting_tokens(_integers(content["tokens"], f"{where}: tokens"), shape, vocab, f"{where}: tokens")
    draws = content.get("draws")
    if draws is not None and draws not in DRAWS:
        raise UnusableInput(f"{where}: draws: {_quote(draws)} is none of {', '.join(DRAWS)}")
    return WrittenWorld(
        Tables(shape, target, tuple(drafts), tokens), draws, _thresholds(content.get("thresholds", {}), where)
    )


def _read_json(name: str, where: str) -> Any:
    try:
        raw = read_whole(name, MOST_BYTES)
    except TooLarge:
        raise UnusableInput(f"{where}: larger than {MOST_BYTES} bytes: too large a world to enumerate") from None
    except OSError as why:
        raise UnusableInput(f"{where}: {why.strerror or why}") from None
    try:
        # Decimals are kept as texts, since Python's float would round them before they become fractions.
        return json.loads(
            raw.decode("utf-8"), parse_float=Written, parse_constant=Written, object_pairs_hook=_unique_object
        )
    except UnicodeDecodeError as why:
        raise UnusableInput(f"{where}: not UTF-8 at byte {why.start}") from None
    except json.JSONDecodeError as why:
        raise UnusableInput(f"{where}: not JSON at line {why.lineno}, column {why.colno}: {why.msg}") from None
    except (ValueError, RecursionError) as why:
        raise UnusableInput(f"{where}: not JSON that can be read: {str(why)[:LONGEST]}") from None


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as a dict; a repeated name is refused, since one of its two values would be lost."""
    content: dict[str, Any] = {}
    for name, value in pairs:
        if name in content:
            raise ValueError(f"the name {name[:40]!r} stands twice in one object")
        content[name] = value
    return content


def _table(written: object, shape: Shape, vocab: int | None, where: str) -> dict[Path, Row]:
    """Rows by path; each has `vocab` entries, or as many as the row of the empty path if `vocab` is None."""
    if not isinstance(written, dict):
        raise UnusableInput(f"{where}: is {_kind(written)}, not an object of rows by path, such as {{'': [0.6, 0.4]}}")
    if "" not in written:
        raise UnusableInput(f"{where}: has no row '', which every path without one of its own takes")
    if vocab is None and isinstance(written[""], list):
        vocab = len(written[""])
    rows: dict[Path, Row] = {}
    for name, row in written.items():
        place = f"{where}[{name[:LONGEST]!r}]"
        if not isinstance(row, list):
            raise UnusableInput(f"{place}: is {_kind(row)}, not a list of probabilities")
        if len(row) != vocab:
            raise UnusableInput(f"{place}: {len(row)} probabilities where {vocab} are needed")
        rows[_path(name, shape, vocab, place)] = probabilities(row, place)
    return rows


def _path(name: str, shape: Shape, vocab: int, where: str) -> Path:
    """The path of tokens with a name such as `3 1`."""
    if name and not re.fullmatch(r"(?:0|[1-9]\d{0,5})(?: (?:0|[1-9]\d{0,5}))*", name, re.ASCII):
        raise UnusableInput(f"{where}: is no path (token ids with one blank between them, such as '3 1')")
    path = tuple(int(token) for token in name.split())
    if len(path) > shape.height:
        raise UnusableInput(f"{where}: is longer than the tree is deep ({shape.height})")
    if any(token >= vocab for token in path):
        raise UnusableInput(f"{where}: token {max(path)} is outside the vocabulary of {vocab}")
    return path


def _thresholds(written: object, where: str) -> dict[str, Fraction]:
    if not isinstance(written, dict):
        raise UnusableInput(f"{where}: thresholds: is {_kind(written)}, not an object")
    for name in written:
        if name not in THRESHOLDS:
            raise UnusableInput(
                f"{where}: thresholds: {name[:LONGEST]!r} is no threshold (known: {', '.join(THRESHOLDS)})"
            )
    return {name: exact_number(value, f"{where}: thresholds.{name}") for name, value in written.items()}


def _integers(written: object, where: str) -> Path:
    if not isinstance(written, list):
        raise UnusableInput(f"{where}: is {_kind(written)}, not a list of whole numbers")
    for position, number in enumerate(written):
        # `type`, since True and False are ints by `isinstance`.
        if type(number) is not int or abs(number) >= 10**6:
            raise UnusableInput(f"{where}[{position}]: {_quote(number)} is not a node or token")
    return tuple(written)


def _quote(value: object) -> str:
    return value[:LONGEST] if isinstance(value, Written) else json.dumps(value)[:LONGEST]


def _kind(value: object) -> str:
    """The name of a value's type in JSON."""
    if value is None:
        return "null"
    names = {dict: "an object", list: "a list", Written: "a number", str: "a string", bool: "true or false"}
    return names.get(type(value), "a number")
