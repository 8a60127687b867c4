"""The reading of regular expressions, EBNF and JSON schemas as lists of tokens.

The tokens are in infix order; `specverify.backends.engine.guided.program` compiles them.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from specverify.backends.base import Unsupported

Spans = tuple[tuple[int, int], ...]
"""Code points, as pairs of the first and the last."""


class Token(NamedTuple):
    """A token of a grammar.

    Attributes:
        kind: `set`, `call`, `count`, or the sign itself: `(`, `)`, `|`.
        spans: The characters of a set.
        name: The rule that a call names.
        least: The fewest repetitions of a count.
        most: The most repetitions; -1 for any number.
    """

    kind: str
    spans: Spans = ()
    name: str = ""
    least: int = 0
    most: int = -1


OPEN, CLOSE, BAR = Token("("), Token(")"), Token("|")
OPTIONAL = Token("count", most=1)
SIGNS = {"(": OPEN, ")": CLOSE, "|": BAR, "*": Token("count"), "+": Token("count", least=1), "?": OPTIONAL}
ESCAPED = {"n": 10, "t": 9, "r": 13}
SCAN = re.compile(
    r"""(?P<class>\[\^?(?:\\.|[^\]\\])+\]) | (?P<count>\{\d+(?:,\d*)?\}) | (?P<escape>\\.) | (?P<sign>[()|*+?])""",
    re.VERBOSE | re.DOTALL,
)
IN_CLASS = re.compile(r"(\\.|.)(?:-(\\.|[^\]]))?", re.DOTALL)
IN_RULES = re.compile(r'\s+|(?P<name>[A-Za-z_]\w*)|"(?P<text>(?:\\.|[^"\\])*)"', re.DOTALL)
RULE = re.compile(r"(?m)^[ \t]*([A-Za-z_]\w*)[ \t]*::=")


def text_tokens(text: str) -> list[Token]:
    """The tokens of the text itself, as a group."""
    return [OPEN, *(Token("set", ((ord(sign), ord(sign)),)) for sign in text), CLOSE]


def regex_tokens(text: str) -> list[Token]:
    """The tokens of a regular expression."""
    tokens = []
    position = 0
    while position < len(text):
        match = SCAN.match(text, position)
        if match is None:
            tokens.append(Token("set", ((ord(text[position]), ord(text[position])),)))
            position += 1
        else:
            tokens.append(_token_of(match))
            position = match.end()
    return tokens


def rule_tokens(text: str) -> dict[str, list[Token]]:
    """The tokens of each rule of an EBNF grammar."""
    heads = list(RULE.finditer(text))
    ends = [*(head.start() for head in heads[1:]), len(text)]
    return {head[1]: list(_of_rule(text[head.end() : end])) for head, end in zip(heads, ends, strict=True)}


def _of_rule(text: str) -> Iterator[Token]:
    position = 0
    while position < len(text):
        match = SCAN.match(text, position) or IN_RULES.match(text, position)
        if match is None:
            raise Unsupported(f"the plain matcher cannot read {text[position : position + 20]!r} of the grammar")
        position = match.end()
        if match.re is SCAN:
            yield _token_of(match)
        elif match["name"]:
            yield Token("call", name=match["name"])
        elif match["text"] is not None:
            plain = re.sub(r"\\(.)", lambda escape: chr(_code(escape[0])), match["text"], flags=re.DOTALL)
            yield from text_tokens(plain)


def _token_of(match: re.Match[str]) -> Token:
    if match["sign"]:
        return SIGNS[match["sign"]]
    if match["escape"]:
        code = _code(match["escape"])
        return Token("set", ((code, code),))
    if match["count"]:
        least, comma, most = match["count"][1:-1].partition(",")
        if most:
            return Token("count", least=int(least), most=int(most))
        return Token("count", least=int(least), most=-1 if comma else int(least))
    inside = match["class"][1:-1]
    spans = [(_code(first), _code(last or first)) for first, last in IN_CLASS.findall(inside.removeprefix("^"))]
    return Token("set", _complement(spans) if inside.startswith("^") else tuple(spans))


def _code(sign: str) -> int:
    """The code point of a character or of an escape."""
    return ESCAPED.get(sign[1:], ord(sign[-1])) if len(sign) == 2 else ord(sign)


def _complement(spans: list[tuple[int, int]]) -> Spans:
    ordered = sorted(spans)
    firsts = [0, *(last + 1 for _, last in ordered)]
    lasts = [*(first - 1 for first, _ in ordered), 0x10FFFF]
    # The running maximum, since one span may lie inside another.
    return tuple((max(firsts[: i + 1]), last) for i, last in enumerate(lasts) if max(firsts[: i + 1]) <= last)


def schema_tokens(content: Any) -> list[Token]:
    """The tokens of a decoded JSON schema: JSON texts without white space, properties in the schema's order."""
    if "enum" in content or "const" in content:
        values = content.get("enum", [content.get("const")])
        return _any([text_tokens(json.dumps(value)) for value in values])
    if "anyOf" in content:
        return _any([schema_tokens(option) for option in content["anyOf"]])
    kind = content["type"]
    if kind == "object":
        return _object(content)
    if kind == "array":
        return _array(content)
    if kind == "string":
        return [*text_tokens('"'), OPEN, *regex_tokens(content["pattern"][1:-1]), CLOSE, *text_tokens('"')]
    return regex_tokens({"boolean": "(true|false)", "null": "(null)", "integer": "(0|[1-9][0-9]*)"}[kind])


def _any(options: list[list[Token]]) -> list[Token]:
    alternatives = [token for option in options for token in (BAR, *option)][1:]
    return [OPEN, *alternatives, CLOSE]


def _array(content: Any) -> list[Token]:
    least, most = content.get("minItems", 0), content.get("maxItems", -1)
    item = schema_tokens(content["items"])
    if most == 0:
        return text_tokens("[]")
    further_items = [
        OPEN,
        *text_tokens(","),
        *item,
        CLOSE,
        Token("count", least=max(least - 1, 0), most=max(most - 1, -1)),
    ]
    items = [OPEN, *item, *further_items, CLOSE, *([] if least else [OPTIONAL])]
    return [*text_tokens("["), *items, *text_tokens("]")]


def _object(content: Any) -> list[Token]:
    """The members in order: one option for each member that may come first, the optional ones behind it with commas."""
    parts = content.get("properties", {})
    needed = set(content.get("required", ()))
    members = [(name, text_tokens(f"{json.dumps(name)}:") + schema_tokens(part)) for name, part in parts.items()]
    options = []
    for i, (name, member) in enumerate(members):
        optional_members = []
        for later_name, tokens in members[i + 1 :]:
            optional_members += [OPEN, *text_tokens(","), *tokens, CLOSE, *([] if later_name in needed else [OPTIONAL])]
        options.append([*member, *optional_members])
        if name in needed:
            break
    else:
        options.append([])
    return [*text_tokens("{"), *_any(options), *text_tokens("}")]
