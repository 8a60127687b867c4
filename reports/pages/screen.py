"""The screen that pages are printed on: its width, and whether it shows colours."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TextIO

from specverify.reports.drawing import MARK
from specverify.reports.format import TEXT_ALONE
from specverify.reports.layout80 import LABEL, MARGIN, WIDTH

WIDEST = 160
"""The most columns of a page: longer lines are hard to read."""

BOLD, DIM, RED, GREEN, YELLOW = "1", "2", "31", "32", "33"
"""Codes of the terminal's styles (ECMA-48, SGR); colours by number, so that the terminal's own palette holds."""

HEADLINES = {
    TEXT_ALONE: YELLOW,
    "AGREE": GREEN,
    "FIXED": GREEN,
    "DIFFER": RED,
    "FAILED": RED,
    "COULD NOT JUDGE": YELLOW,
    "CHANGED": YELLOW,
}
"""The colour of a line that begins with a result."""

LABELS = {"expected": GREEN, "observed": RED, "error": YELLOW, "replay": BOLD, "next": BOLD, "failure": RED}
"""The style of a label; the other labels are dim."""

_LABELLED = re.compile(rf"^( {{{MARGIN}}})([A-Za-z][A-Za-z ]{{0,{LABEL - 1}}}?)(  +)(?=\S)")


@dataclass(frozen=True)
class Screen:
    """The screen or file that a page is printed on; a file unless told otherwise.

    Attributes:
        width: Columns, from 80 to WIDEST.
        colour: Whether it shows colours.
    """

    width: int = WIDTH
    colour: bool = False

    def paint(self, page: str) -> str:
        """`page`, which holds no control codes, in colours if there are any: results, labels, the marked node."""
        if not self.colour:
            return page
        return "\n".join(_paint_line(line) for line in page.split("\n"))


def screen_of(file: TextIO, variables: Mapping[str, str]) -> Screen:
    """The screen behind `file`.

    The width is that of COLUMNS, or of the terminal; without either it is 80. Colours need a terminal that is not dumb,
    outside CI, without NO_COLOR (https://no-color.org: any text but an empty one).
    """
    terminal = file.isatty() and variables.get("TERM", "") != "dumb"
    colour = terminal and not variables.get("NO_COLOR") and not in_ci(variables)
    return Screen(min(max(_columns(file, variables, terminal), WIDTH), WIDEST), colour)


def in_ci(variables: Mapping[str, str]) -> bool:
    """Whether a CI service runs the command: such services set CI."""
    return variables.get("CI", "").lower() not in ("", "0", "false")


def _columns(file: TextIO, variables: Mapping[str, str], terminal: bool) -> int:
    """The columns that the environment or the terminal tells; WIDTH if neither does."""
    columns = variables.get("COLUMNS", "")
    if columns.isdecimal() and len(columns) < 6:
        return int(columns)
    if not terminal:
        return WIDTH
    try:
        return os.get_terminal_size(file.fileno()).columns or WIDTH
    except (OSError, ValueError):  # a file that calls itself a terminal and has no descriptor
        return WIDTH


def _paint_line(line: str) -> str:
    """A line of a page in colours."""
    headline = next((word for word in HEADLINES if line.startswith((f"{word}  ", f"{word}\n")) or line == word), None)
    if headline is not None:
        return _style(headline, f"{BOLD};{HEADLINES[headline]}") + line[len(headline) :]
    if MARK in line:  # what stands behind the mark is the sentence beside the tree
        end = line.index(MARK) + len(MARK)
        return _style(line[:end], f"{BOLD};{RED}") + line[end:]
    match = _LABELLED.match(line)
    if match is None:
        return line
    margin, label, gap = match.groups()
    return margin + _style(label, LABELS.get(label, DIM)) + gap + line[match.end() :]


def _style(text: str, style: str) -> str:
    return f"\x1b[{style}m{text}\x1b[0m"
