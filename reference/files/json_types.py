"""JSON of any dataclass of the reference, from its annotations alone.

The schema, the reading and the writing of a type follow from the fields that the type has, so that a field which is
added to a case, or to a stage of `specverify.reference.trace`, is in the format of files too. A type that JSON writes
in a way of its own has an entry in READERS.
"""

import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np

from specverify.reference.family.settings import Settings
from specverify.reference.malformed import Malformed, under

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

READERS: dict[Any, Callable[[Any], Any]] = {}
"""From a type to the function that reads its JSON, where annotations do not say how."""

UNWRITABLE = {"Infinity": np.inf, "-Infinity": -np.inf}
"""The numbers for which JSON has no literal, by the words that stand for them."""


@cache
def field_types(kind: type) -> dict[str, Any]:
    """The type of each field of a dataclass."""
    return get_type_hints(kind)


def schema_of(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """The JSON Schema of a type; `definitions` collects the schemas of arrays and dataclasses, for `$defs`.

    Raises:
        TypeError: The type has no JSON of its own.
    """
    if hint in PLAIN:
        return {"type": PLAIN[hint]}
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is np.ndarray:
        definitions["Array"] = ARRAY
        return {"$ref": "#/$defs/Array"}
    if origin in (Union, types.UnionType):
        member_schema = schema_of(next(member for member in arguments if member is not type(None)), definitions)
        # One keyword where it can be: a complaint about `anyOf` says less than one about a type.
        if isinstance(member_schema.get("type"), str):
            return {**member_schema, "type": [member_schema["type"], "null"]}
        return {"anyOf": [member_schema, {"type": "null"}]}
    if origin is tuple:
        if arguments[1:] != (...,):
            raise TypeError(f"{hint}: a tuple of equal entries is expected")
        return {"type": "array", "items": schema_of(arguments[0], definitions)}
    if origin is not None and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": schema_of(arguments[1], definitions)}
    if not (isinstance(hint, type) and is_dataclass(hint)):
        raise TypeError(f"{hint} has no JSON of its own")
    name = hint.__name__
    if name not in definitions:
        definitions[name] = {}  # the place is kept, for a type that holds itself
        definitions[name] = object_schema(hint, tuple(fields(hint)), definitions)
    return {"$ref": f"#/$defs/{name}"}


def object_schema(kind: type, members: tuple[Field[Any], ...], definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object with the fields `members` of a dataclass; fields with a default may be absent."""
    return {
        "description": inspect.getdoc(kind) or "",
        "type": "object",
        "properties": {member.name: schema_of(field_types(kind)[member.name], definitions) for member in members},
        "required": [
            member.name for member in members if member.default is MISSING and member.default_factory is MISSING
        ],
        "additionalProperties": False,
    }


def decode(hint: Any, content: Any) -> Any:
    """The value of type `hint` that a JSON value stands for; the value must be valid under the schema of `hint`.

    Of a union of classes with tags, the key `kind` chooses one. An array becomes nested lists of Python numbers; its
    dtype and shape are not checked here.

    Raises:
        Malformed: with the path of the field whose value its dataclass refuses.
    """
    if hint in READERS:
        return READERS[hint](content)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is np.ndarray:
        return decode_numbers(content)
    if origin in (Union, types.UnionType):
        if content is None:
            return None
        tagged_kinds = {member.TAG: member for member in arguments if hasattr(member, "TAG")}
        if tagged_kinds:
            return build(tagged_kinds[content["kind"]], untagged(content))
        return decode(next(member for member in arguments if member is not type(None)), content)
    if origin is tuple and arguments[1:] != (...,):
        return tuple(decode(entry, item) for entry, item in zip(arguments, content, strict=True))
    if origin is tuple:
        return _decode_entries(arguments[0], content)
    if origin is not None and issubclass(origin, Mapping):
        return {name: decode(arguments[1], item) for name, item in content.items()}
    if is_dataclass(hint) and isinstance(hint, type):
        return content if isinstance(content, hint) else build(hint, content)
    return float(content) if hint is float else content


def _decode_entries(hint: Any, content: list[Any]) -> tuple[Any, ...]:
    """The entries of a tuple; a complaint inside one of them names its place."""
    if hint in PLAIN:
        return tuple(map(float, content)) if hint is float else tuple(content)
    entries = []
    for i, entry in enumerate(content):
        with under(f"[{i}]"):
            entries.append(decode(hint, entry))
    return tuple(entries)


def build(kind: type, content: Mapping[str, Any]) -> Any:
    """The dataclass `kind` with the fields that `content` holds; the others keep their defaults.

    Raises:
        Malformed: as `decode`.
    """
    values = {}
    for name, item in content.items():
        with under(name):
            values[name] = decode(field_types(kind)[name], item)
    return kind(**values)


def untagged(content: Mapping[str, Any]) -> dict[str, Any]:
    """The object without the key `kind`, by which files name a member of a union."""
    return {name: item for name, item in content.items() if name != "kind"}


def decode_numbers(content: Any) -> Any:
    """Nested lists in which null and the words for infinity are numbers.

    Raises:
        Malformed: for a string, or an object, among the numbers.
    """
    if isinstance(content, list):
        return [decode_numbers(entry) for entry in content]
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
        members = [(member, getattr(value, member.name)) for member in fields(value)]
        return {member.name: encode(item) for member, item in members if not (item is None and member.default is None)}
    if isinstance(value, Mapping):
        return {str(name): encode(item) for name, item in value.items()}
    if isinstance(value, np.ndarray):
        return encode(value.tolist())
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    plain = value.item() if isinstance(value, np.generic) else value
    if isinstance(plain, float) and not np.isfinite(plain):
        return None if np.isnan(plain) else "Infinity" if plain > 0 else "-Infinity"
    return plain


def is_younger(owner: type, field: "Field[Any]") -> bool:
    """Whether the metadata of a field of the dataclass `owner` says `omit_default`."""
    return bool(field.metadata.get("omit_default"))


def _written(value: Any) -> Any:
    """`value`, or the pairs of settings: the default of the field is no family's."""
    return value.pairs if isinstance(value, Settings) else value


def plain(value: Any, may_omit: Callable[[type, "Field[Any]"], bool] = is_younger) -> Any:
    """`value` as JSON holds it: objects, lists, numbers, strings; tuples become lists, NumPy numbers become numbers.

    A field that holds its default is left out where `may_omit` agrees. Without another word those are the fields whose
    metadata says `omit_default`, so that a field added later changes neither older files nor their ids.
    """
    if is_dataclass(value) and not isinstance(value, type):
        owner = type(value)
        content = {}
        for field in fields(value):
            part, default = _written(getattr(value, field.name)), _written(field.default)
            if not (part == default and may_omit(owner, field)):
                content[field.name] = plain(part, may_omit)
        tag = getattr(owner, "TAG", None)  # only classes that share a field with other classes have a tag
        return {"kind": tag, **content} if tag else content
    if isinstance(value, (tuple, list)):
        return [plain(item, may_omit) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item, may_omit) for key, item in value.items()}
    return value.item() if hasattr(value, "item") else value
