"""JSON of any dataclass of the reference, from its annotations alone.

The schema, the reading and the writing of a type follow from the fields that the type has, so that a field which is
added to a stage of `reference.trace` is in the format of recorded traces too.
"""

import inspect
import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np

from reference.malformed import Malformed, under

ARRAY = {
    "description": "Nested lists of numbers or of true and false. null stands for a number that is not there (NaN).",
    "type": "array",
    "items": {
        "anyOf": [
            {"type": ["number", "boolean", "null"]},
            {"enum": ["Infinity", "-Infinity"]},
            {"$ref": "#/$defs/Array"},
        ]
    },
}
"""The schema of an array of any dtype and shape."""

PLAIN = {int: "integer", float: "number", str: "string", bool: "boolean"}
"""The JSON type of each scalar."""

UNWRITABLE = {"Infinity": np.inf, "-Infinity": -np.inf}
"""The numbers for which JSON has no literal, by the words that stand for them."""


@cache
def field_types(kind: type) -> dict[str, Any]:
    """The type of each field of a dataclass."""
    return get_type_hints(kind)


def schema_of(hint: Any, found: dict[str, Any]) -> dict[str, Any]:
    """The JSON Schema of a type; `found` collects the schemas of arrays and dataclasses, for `$defs`.

    Raises:
        TypeError: The type has no JSON of its own.
    """
    if hint in PLAIN:
        return {"type": PLAIN[hint]}
    origin, inside = get_origin(hint), get_args(hint)
    if origin is np.ndarray:
        found["Array"] = ARRAY
        return {"$ref": "#/$defs/Array"}
    if origin in (Union, types.UnionType):
        some = schema_of(next(one for one in inside if one is not type(None)), found)
        # One keyword where it can be: a complaint about `anyOf` says less than one about a type.
        plain = isinstance(some.get("type"), str)
        return {**some, "type": [some["type"], "null"]} if plain else {"anyOf": [some, {"type": "null"}]}
    if origin is tuple:
        if inside[1:] != (...,):
            raise TypeError(f"{hint}: a tuple of equal entries is expected")
        return {"type": "array", "items": schema_of(inside[0], found)}
    if origin is not None and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": schema_of(inside[1], found)}
    if not (isinstance(hint, type) and is_dataclass(hint)):
        raise TypeError(f"{hint} has no JSON of its own")
    name = hint.__name__
    if name not in found:
        found[name] = {}  # the place is kept, for a type that holds itself
        found[name] = object_schema(hint, tuple(fields(hint)), found)
    return {"$ref": f"#/$defs/{name}"}


def object_schema(kind: type, held: tuple[Field[Any], ...], found: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object with the fields `held` of the dataclass `kind`; fields with a default may be absent."""
    return {
        "description": inspect.getdoc(kind) or "",
        "type": "object",
        "properties": {one.name: schema_of(field_types(kind)[one.name], found) for one in held},
        "required": [one.name for one in held if one.default is MISSING and one.default_factory is MISSING],
        "additionalProperties": False,
    }


def decode(hint: Any, content: Any) -> Any:
    """The value of type `hint` that a JSON value stands for; the value must be valid under `schema_of`.

    An array becomes nested lists of Python numbers; its dtype and shape are not checked here.

    Raises:
        Malformed: with the path of the field whose value its dataclass refuses.
    """
    origin, inside = get_origin(hint), get_args(hint)
    if origin is np.ndarray:
        return decode_numbers(content)
    if origin in (Union, types.UnionType):
        return None if content is None else decode(next(one for one in inside if one is not type(None)), content)
    if origin is tuple:
        return _decode_entries(inside[0], content)
    if origin is not None and issubclass(origin, Mapping):
        return {name: decode(inside[1], one) for name, one in content.items()}
    if is_dataclass(hint) and isinstance(hint, type):
        return build(hint, content)
    return float(content) if hint is float else content


def _decode_entries(hint: Any, content: list[Any]) -> tuple[Any, ...]:
    """The entries of a tuple; a complaint inside one of them names its place."""
    if hint in PLAIN:
        return tuple(map(float, content)) if hint is float else tuple(content)
    made = []
    for at, one in enumerate(content):
        with under(f"[{at}]"):
            made.append(decode(hint, one))
    return tuple(made)


def build(kind: type, content: dict[str, Any]) -> Any:
    """The dataclass `kind` with the fields that `content` holds; the others keep their defaults.

    Raises:
        Malformed: as `decode`.
    """
    given = {}
    for name, one in content.items():
        with under(name):
            given[name] = decode(field_types(kind)[name], one)
    return kind(**given)


def decode_numbers(content: Any) -> Any:
    """Nested lists in which null and the words for infinity are numbers.

    Raises:
        Malformed: for a string, or an object, among the numbers.
    """
    if isinstance(content, list):
        return [decode_numbers(one) for one in content]
    if content is None:
        return float("nan")
    if isinstance(content, str) and content in UNWRITABLE:
        return UNWRITABLE[content]
    if isinstance(content, (int, float)):
        return content
    raise Malformed("", f"{content!r:.40} stands among numbers")


def encode(value: Any) -> Any:
    """`value` as JSON holds it: the opposite of `decode`. Fields that hold their default None are left out."""
    if is_dataclass(value) and not isinstance(value, type):
        held = [(one, getattr(value, one.name)) for one in fields(value)]
        return {one.name: encode(item) for one, item in held if not (item is None and one.default is None)}
    if isinstance(value, Mapping):
        return {str(name): encode(one) for name, one in value.items()}
    if isinstance(value, np.ndarray):
        return encode(value.tolist())
    if isinstance(value, (tuple, list)):
        return [encode(one) for one in value]
    plain = value.item() if isinstance(value, np.generic) else value
    if isinstance(plain, float) and not np.isfinite(plain):
        return None if np.isnan(plain) else "Infinity" if plain > 0 else "-Infinity"
    return plain
