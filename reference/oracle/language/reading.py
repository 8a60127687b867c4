"""The reading of regular expressions and of EBNF rules as expressions."""

import re

from specverify.reference.malformed import Malformed
from specverify.reference.oracle.language.by_library import CLASSES, READINGS, TAKE_SURROGATES, complement
from specverify.reference.oracle.language.expressions import (
    EMPTY,
    Call,
    Expression,
    Language,
    Ranges,
    alternatives,
    character,
    literal,
    repetition,
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
    """Reads an expression from `text`, a regular one, or with `rules` the right side of an EBNF rule.

    A regular one of a `library` may hold classes of letters, which that library reads in its own way.
    """

    def __init__(self, text: str, rules: bool = False, library: str = "plain") -> None:
        self.text = text
        self._reading = None if rules else READINGS.get(library)
        self._surrogates = library in TAKE_SURROGATES
        self.position = 0
        self.called_rules: set[str] = set()
        self._rules = rules

    def read_all(self) -> Expression:
        """The expression that the whole text is; raises Malformed."""
        expression = self._options()
        if self.position < len(self.text):
            raise self._complaint(f"{self.text[self.position]!r} has nothing to close")
        return expression

    def _complaint(self, reason: str) -> Malformed:
        return Malformed("text", f"{reason}, at character {self.position} of {self.text[:60]!r}")

    def _peek(self) -> str:
        while self._rules and self.text[self.position : self.position + 1].isspace():
            self.position += 1
        return self.text[self.position : self.position + 1]

    def _take(self) -> str:
        if self.position >= len(self.text):
            raise self._complaint("ends too early")
        self.position += 1
        return self.text[self.position - 1]

    def _options(self) -> Expression:
        options = [self._sequence()]
        while self._peek() == "|":
            self._take()
            options.append(self._sequence())
        return alternatives(*options)

    def _sequence(self) -> Expression:
        parts: list[Expression] = []
        while (sign := self._peek()) and sign not in "|)":
            parts.append(self._repetition(self._atom(sign)))
        return sequence(*parts)

    def _repetition(self, part: Expression) -> Expression:
        sign = self._peek()
        counts = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        if sign in counts and sign:
            self._take()
            part = repetition(part, *counts[sign])
        elif sign == "{":
            match = re.compile(r"\{(\d{1,4})(,?)(\d{0,4})\}").match(self.text, self.position)
            if match is None:
                raise self._complaint("braces hold no count")
            self.position = match.end()
            least = int(match[1])
            most = least if not match[2] else int(match[3]) if match[3] else None
            if max(least, most or 0) > MOST or (most is not None and most < least):
                raise self._complaint(f"the count {match[0]} is refused")
            part = repetition(part, least, most)
        else:
            return part
        if self._peek() and self._peek() in "*+?{":
            raise self._complaint("a repetition of a repetition wants a group")
        return part

    def _atom(self, sign: str) -> Expression:
        if sign == "(":
            self._take()
            if self.text.startswith("?", self.position):
                raise self._complaint("groups have no options")
            expression = self._options()
            if self._peek() != ")":
                raise self._complaint("the group is not closed")
            self._take()
            return expression
        if sign == "[":
            return character(self._class(), self._surrogates)
        if sign in "*+?{":
            raise self._complaint("nothing to repeat")
        if self._names_class():
            return character(self._named_class(), self._surrogates)
        if not self._rules:
            return literal(self._plain_letter())
        if sign == '"':
            return self._quoted()
        name = NAME.match(self.text, self.position)
        if name is None:
            raise self._complaint(f"{sign!r} begins no literal, class, name or group")
        self.position = name.end()
        self.called_rules.add(name[0])
        return Call(rule=name[0])

    def _plain_letter(self) -> str:
        if self.text[self.position] in ".^$]}":
            raise self._complaint(f"{self.text[self.position]!r} is refused: write a class, or a backslash before it")
        return self._letter()

    def _letter(self) -> str:
        sign = self._take()
        if sign != "\\":
            return sign
        sign = self._take()
        if sign in CONTROL:
            return CONTROL[sign]
        if sign in CLASSES:
            raise self._complaint(
                f"the escape \\{sign} is refused: one library counts letters and digits of all alphabets, another "
                "those of ASCII; write a class, or name the library that reads the grammar"
            )
        if sign not in SPECIAL:
            raise self._complaint(f"the escape \\{sign} is refused: write a class")
        return sign

    def _names_class(self) -> bool:
        """Whether a class of letters comes next, and a library says which letters these are."""
        escape = self.text[self.position : self.position + 2]
        return self._reading is not None and len(escape) == 2 and escape[0] == "\\" and escape[1] in CLASSES

    def _named_class(self) -> Ranges:
        assert self._reading is not None
        self._take()
        return self._reading.members(self._take())

    def _quoted(self) -> Expression:
        self._take()
        text = ""
        while self.text[self.position : self.position + 1] != '"':
            text += self._letter()
        self._take()
        return literal(text) if text else EMPTY

    def _class(self) -> Ranges:
        self._take()
        negated = self.text.startswith("^", self.position)
        self.position += negated
        ranges: list[tuple[int, int]] = []
        while self.text[self.position : self.position + 1] != "]":
            if self._names_class():
                ranges += self._named_class()
                continue
            first = ord(self._letter())
            last = first
            if self.text.startswith("-", self.position) and not self.text.startswith("-]", self.position):
                self._take()
                last = ord(self._letter())
            if last < first:
                raise self._complaint("a range of a class is backwards")
            ranges.append((first, last))
        self._take()
        if not ranges:
            raise self._complaint("the class is empty")
        return complement(tuple(ranges)) if negated else tuple(ranges)


def read_regular(text: str, library: str = "plain") -> Expression:
    """The expression of a regular expression, as `library` reads it; raises Malformed."""
    return Reader(text, library=library).read_all()


def read_rules(text: str, library: str = "plain") -> Language:
    """The language of EBNF rules, as `library` reads them; raises Malformed."""
    rules_by_name: dict[str, Expression] = {}
    called_rules: set[str] = {"root"}
    # A rule ends where the next one begins, at the beginning of a line.
    pieces = re.split(rf"(?m)^[ \t]*({NAME.pattern})[ \t]*::=", text)
    if pieces[0].strip():
        raise Malformed("text", f"{pieces[0].strip()[:40]!r} stands before the first rule")
    for name, body in zip(pieces[1::2], pieces[2::2], strict=True):
        if name in rules_by_name:
            raise Malformed("text", f"rule {name} is written twice")
        reader = Reader(body.strip(), rules=True, library=library)
        rules_by_name[name] = reader.read_all()
        called_rules |= reader.called_rules
    for name in sorted(called_rules):
        if name not in rules_by_name:
            raise Malformed("text", f"there is no rule {name}")
    return Language(Call(rule="root"), rules_by_name)
