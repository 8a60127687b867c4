"""Expressions of languages of bytes, and their derivatives (Brzozowski 1964).

The derivative of a language by a byte holds what may follow that byte. An expression is `NEVER` exactly where its
language is empty, so that a text can go on if its derivative is not `NEVER`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from reference.malformed import Malformed

LAST = 0x10FFFF
"""The last code point."""

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
    """A character of `ranges` in UTF-8, of which the bytes `head` have been read."""

    ranges: Ranges = ()
    head: bytes = b""


@dataclass(frozen=True)
class Sequence(Expression):
    """A text of `first`, then one of `rest`."""

    first: Expression = EMPTY
    rest: Expression = EMPTY


@dataclass(frozen=True)
class Either(Expression):
    """A text of any of `options`."""

    options: frozenset[Expression] = frozenset()


@dataclass(frozen=True)
class Repeated(Expression):
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
    whole = EMPTY
    for part in reversed(parts):
        if NEVER in (part, whole):
            return NEVER
        whole = whole if part == EMPTY else part if whole == EMPTY else Sequence(first=part, rest=whole)
    return whole


def either(*options: Expression) -> Expression:
    """Any of the options."""
    flat: set[Expression] = set()
    for one in options:
        flat |= one.options if isinstance(one, Either) else {one} - {NEVER}
    return NEVER if not flat else flat.pop() if len(flat) == 1 else Either(options=frozenset(flat))


def repeated(part: Expression, least: int, most: int | None) -> Expression:
    """`least` to `most` texts of `part`."""
    if most == 0 or part == EMPTY:
        return EMPTY
    if part == NEVER:
        return NEVER if least else EMPTY
    return part if (least, most) == (1, 1) else Repeated(part=part, least=least, most=most)


def character(ranges: Ranges) -> Expression:
    """A character of `ranges`, surrogates left out."""
    kept: list[tuple[int, int]] = []
    for first, last in ranges:
        pieces = ((first, min(last, 0xD7FF)), (max(first, 0xE000), last))
        kept += [piece for piece in pieces if piece[0] <= piece[1]]
    return Character(ranges=tuple(kept)) if kept else NEVER


def literal(text: str) -> Expression:
    """The text itself."""
    return sequence(*(character(((ord(one), ord(one)),)) for one in text))


def beginning(head: bytes) -> tuple[int, int] | None:
    """The first and the last code point whose UTF-8 encoding begins with `head`; None if there is none."""
    lead = head[0]
    size = 1 if lead < 0x80 else 2 if 0xC0 <= lead < 0xE0 else 3 if 0xE0 <= lead < 0xF0 else 4 if lead < 0xF8 else 0
    if lead in range(0x80, 0xC0) or not size or any(one & 0xC0 != 0x80 for one in head[1:]):
        return None
    value = lead if size == 1 else lead & (0x7F >> size)
    for one in head[1:]:
        value = value << 6 | one & 0x3F
    free = 6 * (size - len(head))
    # A shorter encoding of the same number is the only one that is valid.
    least = (0, 0x80, 0x800, 0x10000)[size - 1]
    first, last = max(value << free, least), min((value + 1 << free) - 1, LAST)
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
        self._known: dict[tuple[Expression, int], Expression] = {}
        self._empty: set[str] = set()
        self._check_ends()
        # The rules that match the empty text, as the least fixed point.
        while more := {name for name, body in self.rules.items() if name not in self._empty and self.ends(body)}:
            self._empty |= more

    def ends(self, one: Expression) -> bool:
        """Whether the empty text is one of the language."""
        if isinstance(one, Sequence):
            return self.ends(one.first) and self.ends(one.rest)
        if isinstance(one, Either):
            return any(map(self.ends, one.options))
        if isinstance(one, Repeated):
            return one.least == 0 or self.ends(one.part)
        return one == EMPTY or (isinstance(one, Call) and one.rule in self._empty)

    def after(self, one: Expression, byte: int, calls: tuple[str, ...] = ()) -> Expression:
        """The texts that follow `byte` in texts of `one`.

        Raises:
            Malformed: A rule calls itself before it has matched anything; `calls` are the rules on the way.
        """
        key = (one, byte)
        if key not in self._known:
            self._known[key] = self._derived(one, byte, calls)
        return self._known[key]

    def _derived(self, one: Expression, byte: int, calls: tuple[str, ...]) -> Expression:
        if isinstance(one, Character):
            return _next_of(one, byte)
        if isinstance(one, Sequence):
            left = sequence(self.after(one.first, byte, calls), one.rest)
            return either(left, self.after(one.rest, byte, calls)) if self.ends(one.first) else left
        if isinstance(one, Either):
            return either(*(self.after(option, byte, calls) for option in one.options))
        if isinstance(one, Repeated):
            most = None if one.most is None else one.most - 1
            again = repeated(one.part, max(one.least - 1, 0), most)
            return sequence(self.after(one.part, byte, calls), again)
        if isinstance(one, Call):
            if one.rule in calls:
                raise Malformed("text", f"rule {one.rule} calls itself before it has matched a character")
            return self.after(self.rules[one.rule], byte, (*calls, one.rule))
        return NEVER

    def _check_ends(self) -> None:
        """Refuse a rule that matches no text at all: what calls it would look as if it could go on."""
        finite: set[str] = set()

        def has_text(one: Expression) -> bool:
            if isinstance(one, Sequence):
                return has_text(one.first) and has_text(one.rest)
            if isinstance(one, Either):
                return any(map(has_text, one.options))
            if isinstance(one, Repeated):
                return one.least == 0 or has_text(one.part)
            return one.rule in finite if isinstance(one, Call) else one != NEVER

        while more := {name for name, body in self.rules.items() if name not in finite and has_text(body)}:
            finite |= more
        for name in self.rules:
            if name not in finite:
                raise Malformed("text", f"rule {name} matches no text")
        if not has_text(self.start):
            raise Malformed("text", "matches no text")


def _next_of(one: Character, byte: int) -> Expression:
    head = one.head + bytes([byte])
    span = beginning(head)
    if span is None or not any(first <= span[1] and span[0] <= last for first, last in one.ranges):
        return NEVER
    # Bounds of one code point: the character is complete. No head of fewer bytes has equal bounds.
    return EMPTY if span[0] == span[1] else Character(ranges=one.ranges, head=head)
