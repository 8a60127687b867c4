"""Case files: writing a case as JSON, and reading it with every field checked.

A field that is unknown or malformed is refused, and the complaint names the path of the field.
"""

import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import Field, fields
from functools import cache
from importlib.resources import files
from typing import Any

import jsonschema

from specverify.reference import draft, layout
from specverify.reference.adapters import Adapter
from specverify.reference.architecture import Architecture, Rope, Seeded
from specverify.reference.case import SCHEMA, Case
from specverify.reference.draft.layer_head import HeadLayer
from specverify.reference.family import FAMILIES
from specverify.reference.files.json_types import build, is_younger, plain
from specverify.reference.layout import KvLayout
from specverify.reference.malformed import Malformed
from specverify.reference.rules import Rule
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.session import Mate

SHORTENED = (Case, Seeded, Architecture, Rope, HeadLayer, Adapter, KvLayout, Sampling, Rule, Stops, Mate)
"""Dataclasses of which a file may lack every field that has a default.

A draft is none of them: its kind may bring a schema of its own.
"""


def _is_integer(_: object, value: object) -> bool:
    """Accept an int alone: JSON Schema takes 2.0 for an integer, but no list can be indexed with it."""
    return isinstance(value, int) and not isinstance(value, bool)


PLAIN: dict[str, tuple[type, ...]] = {"integer": (int,), "number": (int, float), "string": (str,)}
"""Types of list items that are checked without the validator, which takes 40 microseconds for each item."""


def _items(validator: Any, items: Any, content: Any, within: Any) -> Iterator[Any]:
    """The keyword `items`: skip a list that is too long, and stop a list of plain items at the first error.

    `maxItems` refuses the long list; without this a file of 60 megabytes would be validated for half an hour.
    """
    if not isinstance(content, list) or len(content) > within.get("maxItems", len(content)):
        return
    # Items with any other keyword go to the validator one by one.
    types = PLAIN.get(items.get("type")) if set(items) <= {"type", "minimum", "maximum"} else None
    least, most = items.get("minimum"), items.get("maximum")
    for i, value in enumerate(content):
        if types is None:
            yield from validator.descend(value, items, path=i)
        elif type(value) not in types or (least is not None and value < least) or (most is not None and value > most):
            yield from validator.descend(value, items, path=i)
            return


def _most(_: Any, most: int, content: Any, __: Any) -> Iterator[Any]:
    """The keyword `maxItems`, with a message that counts the items instead of repeating them."""
    if isinstance(content, list) and len(content) > most:
        yield jsonschema.exceptions.ValidationError(f"{len(content)} entries; at most {most} may stand here")


Validator = jsonschema.validators.extend(
    jsonschema.Draft202012Validator,
    validators={"items": _items, "maxItems": _most},
    type_checker=jsonschema.Draft202012Validator.TYPE_CHECKER.redefine("integer", _is_integer),
)
"""The validator of case files and recorded traces: its integers are ints, and long lists cost little."""


def case_to_json(case: Case) -> dict[str, Any]:
    """The case as a JSON object, with its schema version and id."""
    return {"schema": SCHEMA, "id": case.id, **plain(case)}


def short_json(case: Case) -> dict[str, Any]:
    """The same object without the fields of SHORTENED that hold their default; `case_from_json` fills them in."""

    def may_omit(owner: type, field: "Field[Any]") -> bool:
        return owner in SHORTENED or is_younger(owner, field)

    return {"schema": SCHEMA, "id": case.id, **plain(case, may_omit)}


@cache
def _shipped_schema() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((files("specverify.reference") / "case.schema.json").read_text())
    return content


def schema() -> dict[str, Any]:
    """The JSON Schema that ships with the package, completed by the kinds registered in this process.

    A kind of draft adds the schema of its object; a KV layout and a model family add their names.
    """
    tags = tuple(tag for tag, kind in draft.KINDS.items() if kind.SCHEMA is not None)
    return _complete_schema(tags, tuple(layout.KINDS), tuple(FAMILIES))


@cache
def _complete_schema(drafts: tuple[str, ...], layouts: tuple[str, ...], families: tuple[str, ...]) -> dict[str, Any]:
    """The shipped schema with these names; `drafts` are the tags of the kinds of draft that bring a schema."""
    # `_shipped_schema` is cached, so the copy is what may be changed.
    content = deepcopy(_shipped_schema())
    content["properties"]["layout"]["properties"]["kind"]["enum"] = list(layouts)
    content["$defs"]["architecture"]["properties"]["family"]["enum"] = list(families)
    draft_schema = content["$defs"]["draft"]
    draft_schema["properties"]["kind"]["enum"] += drafts
    draft_schema["allOf"] += [
        {"if": {"properties": {"kind": {"const": tag}}}, "then": draft.KINDS[tag].SCHEMA} for tag in drafts
    ]
    return content


def dotted_path(path: Any) -> str:
    """A JSON path in the notation of messages: `draft.trees[0].token[2]`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.lstrip(".")


def case_from_json(content: Any) -> Case:
    """The case that `content`, a decoded JSON value, describes.

    Raises:
        Malformed: with the path of the field, for a newer schema, an unknown or missing field, a wrong type, or a
            value that its field may not hold; also when `id` is not the digest of the rest.
    """
    if not isinstance(content, dict):
        raise Malformed("", f"a case is a JSON object, not {type(content).__name__}")
    # Looked at before the validator, which would complain of the newer file's unknown fields instead.
    version = content.get("schema")
    if isinstance(version, int) and not isinstance(version, bool) and version > SCHEMA:
        raise Malformed("schema", f"version {version} is newer than the {SCHEMA} known here: update specverify")
    validator = Validator(schema())
    complaint = jsonschema.exceptions.best_match(validator.iter_errors(content))
    if complaint is not None:
        raise Malformed(dotted_path(complaint.absolute_path), shorten(complaint.message))
    return case_of_record(content)


def case_of_record(content: dict[str, Any]) -> Case:
    """The case of an object that this program wrote; its digest stands for the schema, whose validator takes 5 ms.

    Raises:
        Malformed: A field is missing or holds what it may not, or `id` is not the digest of the rest.
    """
    case = build_case(content)
    if content["id"] != case.id:
        raise Malformed(
            "id", f"{content['id']} is not the digest of this case ({case.id}): the file was edited or damaged"
        )
    return case


def build_case(content: dict[str, Any]) -> Case:
    """The case of an object that the schema admits, whatever its id; raises Malformed with the path of the field."""
    # By the order of the fields, so that the first of several complaints does not follow from the order of the file.
    case: Case = build(Case, {field.name: content[field.name] for field in fields(Case) if field.name in content})
    return case


def shorten(message: str) -> str:
    """A complaint of the validator on one line of at most 160 characters."""
    line = " ".join(message.split())
    return line if len(line) <= 160 else f"{line[:157]}..."
