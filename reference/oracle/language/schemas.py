"""The reading of JSON schemas as expressions of JSON texts without white space."""

import json
from typing import Any

from reference.malformed import Malformed
from reference.oracle.language.expressions import (
    EMPTY,
    Expression,
    character,
    either,
    literal,
    repeated,
    sequence,
)
from reference.oracle.language.reading import regular

KEYS = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "minItems", "maxItems"},
    "string": {"pattern"},
    "boolean": set(),
    "null": set(),
    "integer": {"minimum"},
}  # fmt: skip
"""The keys that each type may have beside `type`."""

REFUSED = "the libraries read it in different ways"


def schema(text: str) -> Expression:
    """The expression of a JSON schema; raises Malformed."""
    try:
        content = json.loads(text)
    except ValueError as why:
        raise Malformed("text", f"is no JSON: {why}") from None
    return _value(content)


def _value(content: Any) -> Expression:
    if not isinstance(content, dict):
        raise Malformed("text", f"a schema is an object, not {str(content)[:40]}")
    for name in ("enum", "const"):
        if name in content:
            _check(content, {name, "type"}, name)
            values = content["enum"] if name == "enum" else [content["const"]]
            return either(*map(_constant, values))
    if "anyOf" in content:
        _check(content, {"anyOf"}, "anyOf")
        return either(*map(_value, content["anyOf"]))
    kind = content.get("type")
    if kind not in KEYS:
        odd = next((key for key in content if key != "type"), None)
        raise Malformed("text", f"type {kind!r} is refused" if odd is None or kind else f"{odd} is refused: {REFUSED}")
    _check(content, {"type", *KEYS[kind]}, str(kind))
    if kind == "object":
        return _object(content)
    if kind == "array":
        return _array(content)
    if kind == "string":
        return _string(content)
    if kind == "integer":
        if content.get("minimum") != 0:
            raise Malformed("text", f"an integer without minimum: 0 is refused, for -0: {REFUSED}")
        return either(literal("0"), sequence(character(((49, 57),)), repeated(character(((48, 57),)), 0, None)))
    return literal("null") if kind == "null" else either(literal("true"), literal("false"))


def _check(content: dict[str, Any], known: set[str], what: str) -> None:
    odd = sorted(set(content) - known)
    if odd:
        raise Malformed("text", f"{odd[0]} beside {what} is refused: {REFUSED}")


def _constant(value: Any) -> Expression:
    if isinstance(value, (list, dict, float)) or (isinstance(value, str) and json.dumps(value) != f'"{value}"'):
        raise Malformed("text", f"the constant {str(value)[:40]!r} is refused: {REFUSED}")
    return literal(json.dumps(value))


def _string(content: dict[str, Any]) -> Expression:
    pattern = content.get("pattern")
    if not isinstance(pattern, str) or not (pattern.startswith("^") and pattern.endswith("$")):
        raise Malformed("text", f"a string without a pattern ^...$, enum or const is refused: {REFUSED}")
    if set(pattern) & set('"\\') or "[^" in pattern:
        raise Malformed("text", f"the pattern {pattern[:40]} may match what JSON escapes: it is refused")
    quote = literal('"')
    return sequence(quote, regular(pattern[1:-1]), quote)


def _array(content: dict[str, Any]) -> Expression:
    least, most = content.get("minItems", 0), content.get("maxItems")
    if "items" not in content or (most is not None and most < least):
        raise Malformed("text", "an array has items, and minItems is at most maxItems")
    item = _value(content["items"])
    more = sequence(literal(","), item)
    some = sequence(item, repeated(more, max(least - 1, 0), None if most is None else most - 1))
    filled = EMPTY if most == 0 else some
    return sequence(literal("["), filled if least else either(filled, EMPTY), literal("]"))


def _object(content: dict[str, Any]) -> Expression:
    parts, needed = content.get("properties", {}), content.get("required", [])
    if content.get("additionalProperties") is not False:
        raise Malformed("text", "an object without additionalProperties: false is refused")
    if set(needed) - set(parts):
        raise Malformed("text", "required names a property that is not described")
    members = [(sequence(_constant(name), literal(":"), _value(part)), name in needed) for name, part in parts.items()]
    return sequence(literal("{"), _members(members, False), literal("}"))


def _members(members: list[tuple[Expression, bool]], comma: bool) -> Expression:
    """The members from the first on; with `comma` there was one before."""
    if not members:
        return EMPTY
    (one, needed), rest = members[0], members[1:]
    taken = sequence(literal(",") if comma else EMPTY, one, _members(rest, True))
    return taken if needed else either(taken, _members(rest, comma))
