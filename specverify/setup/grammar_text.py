"""The text of a grammar file as the dialect has it: without what changes no text of the language.

The two libraries pass over annotations of a JSON schema, read a reference as what it names, and know comments.
"""

import json
import re
from typing import Any

from specverify.reference.malformed import Malformed

ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$schema", "$id", "$comment"}
)
"""Keywords that say nothing of the texts that fit a schema (JSON Schema 2020-12, Validation, section 9)."""

DEFINITIONS = ("$defs", "definitions")
"""The keywords that hold schemas by name."""

OF_SCHEMAS = ("properties",)
"""The keywords whose values are schemas by names of any kind."""

COMMENT = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|(#[^\n]*)')
"""A literal, a class, or a comment up to the end of its line."""


def plain_text(kind: str, text: str) -> str:
    """The text of a grammar of this kind without annotations, references and comments.

    Raises:
        Malformed: A reference of a JSON schema names nothing, or what it names holds the reference itself.
    """
    if kind == "ebnf":
        return COMMENT.sub(lambda match: "" if match[1] else match[0], text)
    if kind != "json_schema":
        return text
    try:
        content = json.loads(text)
    except ValueError:
        return text  # the reading of the grammar says what is wrong
    if not isinstance(content, dict):
        return text
    plain = _plain_schema(content, content, ())
    return text if plain == content else json.dumps(plain, ensure_ascii=False)


def _plain_schema(schema: Any, root: dict[str, Any], names: tuple[str, ...]) -> Any:
    """A schema within `root` without annotations; `names` are the references that led to it."""
    if isinstance(schema, list):
        return [_plain_schema(entry, root, names) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        further = sorted(set(schema) - ANNOTATIONS - {"$ref", *DEFINITIONS})
        if further:
            raise Malformed("text", f"{further[0]} beside $ref is refused: the libraries read it in different ways")
        return _plain_schema(_referenced(schema["$ref"], root, names), root, (*names, schema["$ref"]))
    plain: dict[str, Any] = {}
    for name, value in schema.items():
        if name in ANNOTATIONS or name in DEFINITIONS:
            continue
        if name in OF_SCHEMAS and isinstance(value, dict):
            plain[name] = {member: _plain_schema(part, root, names) for member, part in value.items()}
        elif name in ("items", "anyOf"):
            plain[name] = _plain_schema(value, root, names)
        else:
            plain[name] = value
    return plain


def _referenced(reference: Any, root: dict[str, Any], names: tuple[str, ...]) -> Any:
    """The schema that a reference names."""
    if reference in names:
        raise Malformed("text", f"$ref {str(reference)[:60]} leads to itself: a schema of any depth is refused")
    parts = reference.split("/") if isinstance(reference, str) else []
    if len(parts) != 3 or parts[0] != "#" or parts[1] not in DEFINITIONS:
        raise Malformed("text", f"$ref {str(reference)[:60]} is refused: #/$defs/NAME is read")
    definitions = root.get(parts[1])
    if not isinstance(definitions, dict) or parts[2] not in definitions:
        raise Malformed("text", f"$ref {reference[:60]} names nothing")
    return definitions[parts[2]]
