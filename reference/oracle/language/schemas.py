"""The reading of JSON schemas as expressions of JSON texts without white space."""

import json
import re
from typing import Any

from specverify.reference.malformed import Malformed
from specverify.reference.oracle.language.by_library import CLASSES, READINGS
from specverify.reference.oracle.language.expressions import (
    EMPTY,
    Alternatives,
    Character,
    Expression,
    Repetition,
    Sequence,
    alternatives,
    character,
    literal,
    repetition,
    sequence,
)
from specverify.reference.oracle.language.reading import read_regular

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


def schema(text: str, library: str = "plain") -> Expression:
    """The expression of a JSON schema, as `library` reads it; raises Malformed."""
    try:
        content = json.loads(text)
    except ValueError as why:
        raise Malformed("text", f"is no JSON: {why}") from None
    return _value(content, library)


def _value(content: Any, library: str) -> Expression:
    if not isinstance(content, dict):
        raise Malformed("text", f"a schema is an object, not {str(content)[:40]}")
    for name in ("enum", "const"):
        if name in content:
            _check(content, {name, "type"}, name)
            values = content["enum"] if name == "enum" else [content["const"]]
            _check_type(content, values)
            return alternatives(*map(_constant, values))
    if "anyOf" in content:
        _check(content, {"anyOf"}, "anyOf")
        return alternatives(*(_value(part, library) for part in content["anyOf"]))
    kind = content.get("type")
    if kind not in KEYS:
        odd_key = next((key for key in content if key != "type"), None)
        raise Malformed(
            "text", f"type {kind!r} is refused" if odd_key is None or kind else f"{odd_key} is refused: {REFUSED}"
        )
    _check(content, {"type", *KEYS[kind]}, str(kind))
    if kind == "object":
        return _object(content, library)
    if kind == "array":
        return _array(content, library)
    if kind == "string":
        return _string(content, library)
    if kind == "integer":
        if "minimum" not in content and library in READINGS:
            return read_regular(READINGS[library].integer)
        if type(content.get("minimum")) is not int or content["minimum"] != 0:
            raise Malformed(
                "text",
                "an integer without minimum: 0 is refused: llguidance reads -0 as one, xgrammar does not; add it, "
                "or name the library that reads the grammar",
            )
        return alternatives(literal("0"), sequence(character(((49, 57),)), repetition(character(((48, 57),)), 0, None)))
    return literal("null") if kind == "null" else alternatives(literal("true"), literal("false"))


def _check(content: dict[str, Any], known_keys: set[str], kind: str) -> None:
    odd_keys = sorted(set(content) - known_keys)
    if odd_keys:
        raise Malformed("text", f"{odd_keys[0]} beside {kind} is refused: {REFUSED}")


JSON_TYPES = {"string": str, "boolean": bool, "integer": int, "null": type(None)}
"""The classes of the constants of each type."""


def _check_type(content: dict[str, Any], values: list[Any]) -> None:
    """Refuse a `type` beside constants of another type, which one library passes over and the other one leaves out."""
    kind = content.get("type")
    if kind is None:
        return
    expected = JSON_TYPES.get(kind) if isinstance(kind, str) else None
    if expected is None or any(type(value) is not expected for value in values):
        raise Malformed("text", f"type {str(kind)[:40]!r} beside constants of another type is refused: {REFUSED}")


def _constant(value: Any) -> Expression:
    if isinstance(value, (list, dict, float)) or (isinstance(value, str) and json.dumps(value) != f'"{value}"'):
        raise Malformed("text", f"the constant {str(value)[:40]!r} is refused: {REFUSED}")
    return literal(json.dumps(value))


def _string(content: dict[str, Any], library: str) -> Expression:
    pattern = content.get("pattern")
    if pattern is None and library in READINGS:
        return read_regular(READINGS[library].string, library)
    if not isinstance(pattern, str) or not (pattern.startswith("^") and pattern.endswith("$")):
        raise Malformed(
            "text",
            "a string without a pattern ^...$, enum or const is refused: xgrammar takes \\/ and U+007F inside it, "
            "llguidance does not; add a pattern, or name the library that reads the grammar",
        )
    escapes = set(re.findall(r"\\(.?)", pattern)) - (set(CLASSES) if library in READINGS else set())
    if '"' in pattern or "[^" in pattern or escapes:
        raise Malformed("text", f"the pattern {pattern[:40]} may match what JSON escapes: it is refused")
    if has_bare_alternatives(pattern[1:-1]):
        raise Malformed("text", f"the pattern {pattern[:40]} has | outside groups: {REFUSED}; write ^(...)$")
    expression = read_regular(pattern[1:-1], library)
    if _may_need_escapes(expression):
        raise Malformed("text", f"the pattern {pattern[:40]} may match what JSON escapes: it is refused")
    quote = literal('"')
    return sequence(quote, expression, quote)


def has_bare_alternatives(pattern: str) -> bool:
    """Whether a regular expression, with no backslash before punctuation, has a | outside of its groups and classes."""
    depth, in_class = 0, False
    for sign in pattern:
        if in_class:
            in_class = sign != "]"
        elif sign == "|" and not depth:
            return True
        else:
            in_class = sign == "["
            depth += (sign == "(") - (sign == ")")
    return False


def _may_need_escapes(expression: Expression) -> bool:
    """Whether some text of the expression holds a quote, a backslash or a control character."""
    if isinstance(expression, Character):
        return any(
            first < 0x20 or any(first <= ord(sign) <= last for sign in '"\\') for first, last in expression.ranges
        )
    if isinstance(expression, Sequence):
        return _may_need_escapes(expression.first) or _may_need_escapes(expression.tail)
    if isinstance(expression, Alternatives):
        return any(map(_may_need_escapes, expression.options))
    return isinstance(expression, Repetition) and _may_need_escapes(expression.part)


def _array(content: dict[str, Any], library: str) -> Expression:
    least, most = content.get("minItems", 0), content.get("maxItems")
    for name in ("minItems", "maxItems"):
        count = content.get(name, 0)
        if type(count) is not int or count < 0:
            raise Malformed("text", f"{name} {str(count)[:40]} is refused, which is no count: {REFUSED}")
    if "items" not in content or (most is not None and most < least):
        raise Malformed("text", "an array has items, and minItems is at most maxItems")
    item = _value(content["items"], library)
    further_item = sequence(literal(","), item)
    items = sequence(item, repetition(further_item, max(least - 1, 0), None if most is None else most - 1))
    filled_array = EMPTY if most == 0 else items
    return sequence(literal("["), filled_array if least else alternatives(filled_array, EMPTY), literal("]"))


def _object(content: dict[str, Any], library: str) -> Expression:
    properties, required = content.get("properties", {}), content.get("required", [])
    if content.get("additionalProperties") is not False:
        raise Malformed("text", "an object without additionalProperties: false is refused")
    if set(required) - set(properties):
        raise Malformed("text", "required names a property that is not described")
    members = [
        (sequence(_constant(name), literal(":"), _value(part, library)), name in required)
        for name, part in properties.items()
    ]
    return sequence(literal("{"), _members(members, False), literal("}"))


def _members(members: list[tuple[Expression, bool]], comma: bool) -> Expression:
    """The members from the first on; with `comma` there was one before."""
    if not members:
        return EMPTY
    (member, is_required), further_members = members[0], members[1:]
    members_with_first = sequence(literal(",") if comma else EMPTY, member, _members(further_members, True))
    return members_with_first if is_required else alternatives(members_with_first, _members(further_members, comma))
