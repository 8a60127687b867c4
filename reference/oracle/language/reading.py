"""The reading of regular expressions and of EBNF rules as expressions."""

import re

from reference.malformed import Malformed
from reference.oracle.language.expressions import (
    EMPTY,
    LAST,
    Call,
    Expression,
    Language,
    Ranges,
    character,
    either,
    literal,
    repeated,
    sequence,
)

SPECIAL = set(".^$*+?()[]{}|\\/-\"'")
"""Characters that a backslash makes literal."""
CONTROL = {"n": "\n", "t": "\t", "r": "\r"}
"""Letters that a backslash makes control characters."""
MOST = 1000
"""Most repetitions that braces may ask for."""
NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


class Reader:
    """Reads an expression from `text`, a regular one, or with `rules` the right side of an EBNF rule."""

    def __init__(self, text: str, rules: bool = False) -> None:
        self.text = text
        self.at = 0
        self.called: set[str] = set()
        self._rules = rules

    def whole(self) -> Expression:
        """The expression that the whole text is; raises Malformed."""
        one = self._options()
        if self.at < len(self.text):
            raise self._wrong(f"{self.text[self.at]!r} has nothing to close")
        return one

    def _wrong(self, why: str) -> Malformed:
        return Malformed("text", f"{why}, at character {self.at} of {self.text[:60]!r}")

    def _peek(self) -> str:
        while self._rules and self.text[self.at : self.at + 1].isspace():
            self.at += 1
        return self.text[self.at : self.at + 1]

    def _take(self) -> str:
        if self.at >= len(self.text):
            raise self._wrong("ends too early")
        self.at += 1
        return self.text[self.at - 1]

    def _options(self) -> Expression:
        options = [self._sequence()]
        while self._peek() == "|":
            self._take()
            options.append(self._sequence())
        return either(*options)

    def _sequence(self) -> Expression:
        parts: list[Expression] = []
        while (sign := self._peek()) and sign not in "|)":
            parts.append(self._counted(self._atom(sign)))
        return sequence(*parts)

    def _counted(self, part: Expression) -> Expression:
        sign = self._peek()
        counts = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        if sign in counts and sign:
            self._take()
            part = repeated(part, *counts[sign])
        elif sign == "{":
            found = re.compile(r"\{(\d{1,4})(,?)(\d{0,4})\}").match(self.text, self.at)
            if found is None:
                raise self._wrong("braces hold no count")
            self.at = found.end()
            least = int(found[1])
            most = least if not found[2] else int(found[3]) if found[3] else None
            if max(least, most or 0) > MOST or (most is not None and most < least):
                raise self._wrong(f"the count {found[0]} is refused")
            part = repeated(part, least, most)
        else:
            return part
        if self._peek() and self._peek() in "*+?{":
            raise self._wrong("a repetition of a repetition wants a group")
        return part

    def _atom(self, sign: str) -> Expression:
        if sign == "(":
            self._take()
            if self.text.startswith("?", self.at):
                raise self._wrong("groups have no options")
            one = self._options()
            if self._peek() != ")":
                raise self._wrong("the group is not closed")
            self._take()
            return one
        if sign == "[":
            return character(self._class())
        if sign in "*+?{":
            raise self._wrong("nothing to repeat")
        if not self._rules:
            return literal(self._plain())
        if sign == '"':
            return self._quoted()
        name = NAME.match(self.text, self.at)
        if name is None:
            raise self._wrong(f"{sign!r} begins no literal, class, name or group")
        self.at = name.end()
        self.called.add(name[0])
        return Call(rule=name[0])

    def _plain(self) -> str:
        if self.text[self.at] in ".^$]}":
            raise self._wrong(f"{self.text[self.at]!r} is refused: write a class, or a backslash before it")
        return self._letter()

    def _letter(self) -> str:
        sign = self._take()
        if sign != "\\":
            return sign
        sign = self._take()
        if sign in CONTROL:
            return CONTROL[sign]
        if sign not in SPECIAL:
            raise self._wrong(f"the escape \\{sign} is refused: write a class")
        return sign

    def _quoted(self) -> Expression:
        self._take()
        text = ""
        while self.text[self.at : self.at + 1] != '"':
            text += self._letter()
        self._take()
        return literal(text) if text else EMPTY

    def _class(self) -> Ranges:
        self._take()
        negated = self.text.startswith("^", self.at)
        self.at += negated
        found: list[tuple[int, int]] = []
        while self.text[self.at : self.at + 1] != "]":
            first = ord(self._letter())
            last = first
            if self.text.startswith("-", self.at) and not self.text.startswith("-]", self.at):
                self._take()
                last = ord(self._letter())
            if last < first:
                raise self._wrong("a range of a class is backwards")
            found.append((first, last))
        self._take()
        if not found:
            raise self._wrong("the class is empty")
        return _others(found) if negated else tuple(found)


def _others(found: list[tuple[int, int]]) -> Ranges:
    """The code points outside `found`."""
    left, begin = [], 0
    for first, last in sorted(found):
        if first > begin:
            left.append((begin, first - 1))
        begin = max(begin, last + 1)
    return (*left, (begin, LAST)) if begin <= LAST else tuple(left)


def regular(text: str) -> Expression:
    """The expression of a regular expression; raises Malformed."""
    return Reader(text).whole()


def rules(text: str) -> Language:
    """The language of EBNF rules; raises Malformed."""
    found: dict[str, Expression] = {}
    called: set[str] = {"root"}
    # A rule ends where the next one begins, at the beginning of a line.
    pieces = re.split(rf"(?m)^[ \t]*({NAME.pattern})[ \t]*::=", text)
    if pieces[0].strip():
        raise Malformed("text", f"{pieces[0].strip()[:40]!r} stands before the first rule")
    for name, body in zip(pieces[1::2], pieces[2::2], strict=True):
        if name in found:
            raise Malformed("text", f"rule {name} is written twice")
        reader = Reader(body.strip(), rules=True)
        found[name] = reader.whole()
        called |= reader.called
    for name in sorted(called):
        if name not in found:
            raise Malformed("text", f"there is no rule {name}")
    return Language(Call(rule="root"), found)
