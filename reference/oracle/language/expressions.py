"""Expressions of languages of bytes, and their derivatives (Brzozowski 1964).

The derivative of a language by a byte holds what may follow that byte. An expression is `NEVER` exactly where its
language is empty, so that a text can go on if its derivative is not `NEVER`.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

from specverify.reference.malformed import Malformed

LAST = 0x10FFFF
"""The last code point."""

LEADS = (range(0x80), range(0xC0, 0xE0), range(0xE0, 0xF0), range(0xF0, 0xF8))
"""The first bytes of UTF-8 encodings of 1, 2, 3 and 4 bytes."""

Ranges = tuple[tuple[int, int], ...]
"""Code points as pairs of the first and the last."""


@dataclass(frozen=True)
class Expression:
    """A language; the two constants below have no parts."""

    name: str = ""


NEVER = Expression("never")
"""The empty language."""
EMPTY = Expression("empty")
"""The language of the empty text."""


@dataclass(frozen=True)
class Character(Expression):
    """A character of `ranges` in UTF-8, of which the bytes `head` have been read; ranges ascend and do not touch."""

    ranges: Ranges = ()
    head: bytes = b""


@dataclass(frozen=True)
class Sequence(Expression):
    """A text of `first`, then one of `tail`."""

    first: Expression = EMPTY
    tail: Expression = EMPTY


@dataclass(frozen=True)
class Alternatives(Expression):
    """A text of any of `options`."""

    options: frozenset[Expression] = frozenset()


@dataclass(frozen=True)
class Repetition(Expression):
    """At least `least` and at most `most` texts of `part`; None for any number."""

    part: Expression = EMPTY
    least: int = 0
    most: int | None = None


@dataclass(frozen=True)
class Call(Expression):
    """A text of the rule `rule`."""

    rule: str = ""


def sequence(*parts: Expression) -> Expression:
    """The parts one after the other."""
    result = EMPTY
    for part in reversed(parts):
        if NEVER in (part, result):
            return NEVER
        if part == EMPTY:
            continue
        result = part if result == EMPTY else Sequence(first=part, tail=result)
    return result


def alternatives(*options: Expression) -> Expression:
    """Any of the options."""
    flat_options: set[Expression] = set()
    for option in options:
        flat_options |= option.options if isinstance(option, Alternatives) else {option} - {NEVER}
    if not flat_options:
        return NEVER
    if len(flat_options) == 1:
        return flat_options.pop()
    return Alternatives(options=frozenset(flat_options))


def repetition(part: Expression, least: int, most: int | None) -> Expression:
    """`least` to `most` texts of `part`."""
    if most == 0 or part == EMPTY:
        return EMPTY
    if part == NEVER:
        return NEVER if least else EMPTY
    return part if (least, most) == (1, 1) else Repetition(part=part, least=least, most=most)


def character(ranges: Ranges, surrogates: bool = False) -> Expression:
    """A character of `ranges`, without the surrogates in them unless these are asked for."""
    pieces = ranges
    if not surrogates:
        halves = (half for first, last in ranges for half in ((first, min(last, 0xD7FF)), (max(first, 0xE000), last)))
        pieces = tuple(half for half in halves if half[0] <= half[1])
    joined: list[tuple[int, int]] = []
    for first, last in sorted(pieces):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        else:
            joined.append((first, last))
    return Character(ranges=tuple(joined)) if joined else NEVER


def literal(text: str) -> Expression:
    """The text itself."""
    return sequence(*(character(((ord(char), ord(char)),)) for char in text))


def beginning(head: bytes) -> tuple[int, int] | None:
    """The first and the last code point whose UTF-8 encoding begins with `head`; None if there is none."""
    first_byte = head[0]
    size = next((size for size, leads in enumerate(LEADS, 1) if first_byte in leads), None)
    if size is None or any(byte & 0xC0 != 0x80 for byte in head[1:]):
        return None
    value = first_byte if size == 1 else first_byte & (0x7F >> size)
    for byte in head[1:]:
        value = value << 6 | byte & 0x3F
    free_bits = 6 * (size - len(head))
    # A shorter encoding of the same number is the only one that is valid.
    least_value = (0, 0x80, 0x800, 0x10000)[size - 1]
    first, last = max(value << free_bits, least_value), min((value + 1 << free_bits) - 1, LAST)
    return (first, last) if first <= last else None


@dataclass
class Language:
    """The texts of `start`, with the rules that it calls.

    Attributes:
        start: The expression of the whole text.
        rules: The expression of each rule.
    """

    start: Expression
    rules: Mapping[str, Expression] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._derivatives: dict[tuple[Expression, int], Expression] = {}
        self._empty: set[str] = set()
        self._check_ends()
        # The rules that match the empty text, as the least fixed point.
        while newly_empty := {
            name for name, body in self.rules.items() if name not in self._empty and self.accepts_empty(body)
        }:
            self._empty |= newly_empty

    def accepts_empty(self, expression: Expression) -> bool:
        """Whether the empty text is one of the language."""
        if isinstance(expression, Sequence):
            return self.accepts_empty(expression.first) and self.accepts_empty(expression.tail)
        if isinstance(expression, Alternatives):
            return any(map(self.accepts_empty, expression.options))
        if isinstance(expression, Repetition):
            return expression.least == 0 or self.accepts_empty(expression.part)
        return expression == EMPTY or (isinstance(expression, Call) and expression.rule in self._empty)

    def derivative(self, expression: Expression, byte: int, calls: tuple[str, ...] = ()) -> Expression:
        """The texts that follow `byte` in texts of `expression`.

        Raises:
            Malformed: A rule calls itself before it has matched anything; `calls` are the rules on the way.
        """
        key = (expression, byte)
        if key not in self._derivatives:
            self._derivatives[key] = self._derive(expression, byte, calls)
        return self._derivatives[key]

    def _derive(self, expression: Expression, byte: int, calls: tuple[str, ...]) -> Expression:
        if isinstance(expression, Character):
            return _next_character(expression, byte)
        if isinstance(expression, Sequence):
            goes_on = sequence(self.derivative(expression.first, byte, calls), expression.tail)
            if not self.accepts_empty(expression.first):
                return goes_on
            return alternatives(goes_on, self.derivative(expression.tail, byte, calls))
        if isinstance(expression, Alternatives):
            return alternatives(*(self.derivative(option, byte, calls) for option in expression.options))
        if isinstance(expression, Repetition):
            most = None if expression.most is None else expression.most - 1
            further = repetition(expression.part, max(expression.least - 1, 0), most)
            return sequence(self.derivative(expression.part, byte, calls), further)
        if isinstance(expression, Call):
            if expression.rule in calls:
                raise Malformed("text", f"rule {expression.rule} calls itself before it has matched a character")
            return self.derivative(self.rules[expression.rule], byte, (*calls, expression.rule))
        return NEVER

    def _check_ends(self) -> None:
        """Refuse a rule that matches no text at all: what calls it would look as if it could go on."""
        finite: set[str] = set()

        def has_text(expression: Expression) -> bool:
            if isinstance(expression, Sequence):
                return has_text(expression.first) and has_text(expression.tail)
            if isinstance(expression, Alternatives):
                return any(map(has_text, expression.options))
            if isinstance(expression, Repetition):
                return expression.least == 0 or has_text(expression.part)
            return expression.rule in finite if isinstance(expression, Call) else expression != NEVER

        while newly_finite := {name for name, body in self.rules.items() if name not in finite and has_text(body)}:
            finite |= newly_finite
        for name in self.rules:
            if name not in finite:
                raise Malformed("text", f"rule {name} matches no text")
        if not has_text(self.start):
            raise Malformed("text", "matches no text")


def _next_character(expression: Character, byte: int) -> Expression:
    head = expression.head + bytes([byte])
    span = beginning(head)
    # The last range that begins at or before the end of the span is the only one that may reach into it from below.
    index = -1 if span is None else bisect_right(expression.ranges, (span[1], LAST)) - 1
    if span is None or index < 0 or expression.ranges[index][1] < span[0]:
        return NEVER
    # Bounds of one code point: the character is complete. No head of fewer bytes has equal bounds.
    return EMPTY if span[0] == span[1] else Character(ranges=expression.ranges, head=head)
