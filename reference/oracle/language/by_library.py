r"""Syntax that libraries read in different ways: classes of letters, JSON strings, integers.

A grammar that names its library is read as that library reads it; the plain dialect refuses this syntax. Found by
asking xgrammar 0.2.9 and llguidance 1.9.1 for every code point and every escape:

- xgrammar reads `\d` and `\w` as of ASCII and `\s` as ECMAScript does, with U+FEFF and without U+0085; llguidance
  reads all three as of Unicode. Of `\s`, xgrammar 0.2.8 knew six characters and U+00A0 alone.
- In a JSON string xgrammar takes `\/`, every `\uXXXX` and U+007F; llguidance takes `\u` for control characters alone.
- llguidance takes the integer -0.
- A class of xgrammar that holds surrogates, as every negated one does, takes their bytes too, which are no UTF-8.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from specverify.reference.oracle.language.expressions import LAST, Ranges
from specverify.reference.oracle.language.unicode_16 import DIGITS, WORD_CHARACTERS

CLASSES = "dwsDWS"
"""The letters that a backslash makes classes of letters; capital ones stand for the complement."""


@dataclass(frozen=True)
class LibraryReading:
    """The reading of a library, where libraries differ.

    Attributes:
        classes: The code points of `d`, `w` and `s`.
        string: The JSON texts of strings, as a regular expression of the dialect.
        integer: Those of integers.
    """

    classes: Mapping[str, Ranges]
    string: str
    integer: str

    def members(self, letter: str) -> Ranges:
        """The code points of the class `letter`, one of CLASSES."""
        ranges = self.classes[letter.lower()]
        return complement(ranges) if letter.isupper() else ranges


def complement(ranges: Ranges) -> Ranges:
    """The code points outside `ranges`."""
    outside, next_point = list[tuple[int, int]](), 0
    for first, last in sorted(ranges):
        if first > next_point:
            outside.append((next_point, first - 1))
        next_point = max(next_point, last + 1)
    return (*outside, (next_point, LAST)) if next_point <= LAST else tuple(outside)


READINGS = {
    "xgrammar": LibraryReading(
        classes={
            "d": ((0x30, 0x39),),
            "w": ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)),
            "s": ((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
                  (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
        },
        string='"([^"\\\\\x00-\x1f]|\\\\(["\\\\/bfnrt]|u[0-9a-fA-F]{4}))*"',
        integer="0|-?[1-9][0-9]*",
    ),
    "llguidance": LibraryReading(
        classes={
            "d": DIGITS,
            "w": WORD_CHARACTERS,
            "s": ((0x09, 0x0D), (0x20, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A),
                  (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)),
        },
        string='"([^"\\\\\x00-\x1f\x7f]|\\\\(["\\\\bfnrt]|u00([01][0-9a-fA-F]|7[fF])))*"',
        integer="-?(0|[1-9][0-9]*)",
    ),
}  # fmt: skip
"""The readings by library; the plain dialect has none."""

TAKE_SURROGATES = ("xgrammar",)
"""The libraries whose classes take the bytes of surrogates."""
