"""Case files: writing a case as JSON, and reading it with every field checked.

A field that is unknown or malformed is refused, and the complaint names the path of the field.
"""

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import Field
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar

import jsonschema

from specverify.reference import draft, layout
from specverify.reference.adapters import Adapter
from specverify.reference.architecture import Architecture, Rope, Seeded
from specverify.reference.case import SCHEMA, Case
from specverify.reference.draft import Draft, Scripted
from specverify.reference.draft.layer_head import HeadLayer
from specverify.reference.family import FAMILIES
from specverify.reference.files.json_parts import adapter_from_json, is_younger, model_from_json, plain
from specverify.reference.grammar import Grammar
from specverify.reference.images import images_from_json
from specverify.reference.layout import KvLayout
from specverify.reference.malformed import Malformed, under
from specverify.reference.rules import Rule
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.session import Action, Mate, Session

T = TypeVar("T")


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
    case = _case(content)
    if content["id"] != case.id:
        raise Malformed(
            "id", f"{content['id']} is not the digest of this case ({case.id}): the file was edited or damaged"
        )
    return case


def shorten(message: str) -> str:
    """A complaint of the validator on one line of at most 160 characters."""
    line = " ".join(message.split())
    return line if len(line) <= 160 else f"{line[:157]}..."


def _build(path: str, make: Callable[[], T]) -> T:
    try:
        return make()
    except Malformed as complaint:
        raise complaint.under(path) from None


def _draft(content: dict[str, Any]) -> Draft:
    with under("draft"):
        return draft.KINDS[content["kind"]].read(content)


def _sampling(content: dict[str, Any]) -> Sampling:
    fields: dict[str, Any] = {}
    for key, value in content.items():
        fields[key] = float(value) if isinstance(getattr(Sampling, key, None), float) else value
    fields["tape"] = tuple(map(float, content.get("tape", ())))
    if "bad_words" in content:
        fields["bad_words"] = tuple(tuple(word) for word in content["bad_words"])
    if "processors" in content:
        fields["processors"] = tuple(content["processors"])
    if "grammar" in content:
        grammar: dict[str, Any] = {**content["grammar"], "words": tuple(content["grammar"]["words"])}
        fields["grammar"] = _build("sampling.grammar", lambda: Grammar(**grammar))
    if "rule" in content:
        rule: dict[str, Any] = dict(content["rule"])
        rule |= {key: float(value) for key, value in rule.items() if key != "name"}
        fields["rule"] = _build("sampling.rule", lambda: Rule(**rule))
    return _build("sampling", lambda: Sampling(**fields))


def _stops(content: dict[str, Any]) -> Stops:
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in content.items()}
    return _build("stops", lambda: Stops(**fields))


def _layout(content: dict[str, Any]) -> KvLayout:
    return _build("layout", lambda: KvLayout(**{**content, "pages": tuple(content.get("pages", ()))}))


def _mate(content: dict[str, Any]) -> Mate:
    return Mate(
        tuple(content["prompt"]),
        _draft(content["draft"]) if "draft" in content else Scripted(),
        _sampling(content.get("sampling", {})),
        _stops(content.get("stops", {})),
        adapter_from_json(content),
        images_from_json(content),
    )


def _session(content: dict[str, Any]) -> Session:
    mates, actions = [], []
    for i, mate in enumerate(content["mates"]):
        with under(f"mates[{i}]"):
            mates.append(_mate(mate))
    for i, action in enumerate(content["actions"]):
        with under(f"actions[{i}]"):
            draft = _draft(action["draft"]) if "draft" in action else None
            actions.append(Action(action["kind"], tuple(action["requests"]), draft))
    return Session(tuple(mates), tuple(actions))


def _case(content: dict[str, Any]) -> Case:
    return Case(
        model=_build("model", lambda: model_from_json(content["model"])),
        prompt=tuple(content["prompt"]),
        draft=_draft(content["draft"]) if "draft" in content else Scripted(),
        layout=_layout(content.get("layout", {})),
        sampling=_sampling(content.get("sampling", {})),
        stops=_stops(content.get("stops", {})),
        dtype=content.get("dtype", "float32"),
        steps=content.get("steps", 0),
        session=_build("session", lambda: _session(content["session"])) if "session" in content else None,
        ranks=content.get("ranks", 1),
        spread=content.get("spread", False),
    )
