"""Annotations, references and comments of a grammar file change no text; what libraries read differently is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from specverify.reference.malformed import Malformed
from specverify.reference.oracle.language import legal_after
from specverify.setup.errors import UnusableInput
from specverify.setup.given_grammar import BYTES, read_grammar
from specverify.setup.grammar_text import plain_text

COLOUR: dict[str, Any] = {"enum": ["red", "blue"]}
PLAIN: dict[str, Any] = {
    "type": "object", "properties": {"title": COLOUR, "count": {"type": "integer", "minimum": 0}},
    "required": ["title", "count"], "additionalProperties": False,
}  # fmt: skip

ANNOTATED: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Reply", "description": "What the tool takes.",
    **PLAIN,
    "properties": {
        "title": {"$ref": "#/$defs/Colour", "description": "its colour"},
        "count": {"type": "integer", "minimum": 0, "default": 3, "examples": [1]},
    },
    "$defs": {"Colour": {"title": "Colour", **COLOUR}},
}  # fmt: skip


def test_annotations_and_references_leave_the_schema_of_their_texts() -> None:
    assert json.loads(plain_text("json_schema", json.dumps(ANNOTATED))) == PLAIN


def test_a_schema_without_them_keeps_its_text() -> None:
    text = json.dumps(PLAIN, indent=3)
    assert plain_text("json_schema", text) == text


def test_an_annotated_file_is_taken(tmp_path: Path) -> None:
    (tmp_path / "reply.json").write_text(json.dumps(ANNOTATED))
    grammar = read_grammar(str(tmp_path / "reply.json"), "plain")
    assert grammar.text == json.dumps(PLAIN)


def test_comments_are_no_part_of_rules(tmp_path: Path) -> None:
    text = 'root ::= "a#" [#b] item # the head\n# a whole line\nitem ::= "c" | "\\"#"\n'
    (tmp_path / "rules.ebnf").write_text(text)
    grammar = read_grammar(str(tmp_path / "rules.ebnf"), "plain")
    assert grammar.text == 'root ::= "a#" [#b] item \n\nitem ::= "c" | "\\"#"'
    for output in (b"a##c", b'a#b"#'):
        assert legal_after(grammar.over(BYTES), (), tuple(output)).is_closed


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a reference to itself": ({"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/A"}}}, "leads to itself"),
    "a reference to nothing": ({"$ref": "#/$defs/A"}, "names nothing"),
    "a reference elsewhere": ({"$ref": "other.json"}, "other.json is refused"),
    "a key beside a reference": (
        {"$ref": "#/$defs/A", "minimum": 0, "$defs": {"A": COLOUR}}, "minimum beside \\$ref is refused",
    ),
    "a type that leaves constants out": ({"type": "integer", "enum": ["a", 1]}, "beside constants of another type"),
    "truth values as numbers": ({"type": "integer", "enum": [True]}, "beside constants of another type"),
    "a class over a quote": ({"type": "string", "pattern": "^[ -~]*$"}, "may match what JSON escapes"),
    "a class over a backslash": ({"type": "string", "pattern": "^[A-z]$"}, "may match what JSON escapes"),
    "alternatives without a group": ({"type": "string", "pattern": "^a|b$"}, r"has \| outside groups"),
    "a negative count": ({"type": "array", "items": COLOUR, "minItems": -1}, "minItems -1 is refused"),
    "a count with a fraction": ({"type": "array", "items": COLOUR, "minItems": 1.0}, "minItems 1.0 is refused"),
    "a bound with a fraction": ({"type": "integer", "minimum": 0.0}, "without minimum: 0 is refused"),
    "an integer of any sign": ({"type": "integer"}, "llguidance reads -0 as one, xgrammar does not"),
    "a string of any letters": ({"type": "string"}, r"xgrammar takes \\/ and U\+007F inside it, llguidance does not"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_libraries_read_differently_is_refused(name: str, tmp_path: Path) -> None:
    content, words = REFUSED[name]
    (tmp_path / "wrong.json").write_text(json.dumps(content))
    with pytest.raises(UnusableInput, match=words):
        read_grammar(str(tmp_path / "wrong.json"), "plain")


@pytest.mark.parametrize("content", [
    {"type": "string", "enum": ["a", "b"]}, {"type": "string", "pattern": "^(a|b)[|]$"},
    {"type": "null", "const": None},
])  # fmt: skip
def test_what_they_read_alike_is_taken(content: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "right.json").write_text(json.dumps(content))
    assert json.loads(read_grammar(str(tmp_path / "right.json"), "plain").text) == content


@pytest.mark.parametrize("letter", "dDwW")
def test_an_escape_of_an_alphabet_is_refused_with_its_reason(letter: str) -> None:
    from specverify.reference.oracle.language.reading import read_regular

    with pytest.raises(Malformed, match="digits of all alphabets, another those of ASCII; write a class"):
        read_regular(f"\\{letter}")
