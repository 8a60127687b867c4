"""Plain text from rich renderables: 80 columns unless a page asks for more.

Text has no colour and no control codes, and is the same on every machine for one width.
"""

import io
from collections.abc import Iterable

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from specverify.reports.format import cut

WIDTH = 80
"""The columns of a page that is told no other width; a wide character counts as two."""

MARGIN = 2
"""The columns by which the body of a page is indented."""

LABEL = 12
"""The columns of a label."""

INDENT = MARGIN + LABEL + 2
"""The column at which the text after a label begins."""

SAID_LINES = 15
"""The number of last lines of a broken run that a page shows; the bundle holds all that were kept."""


def plain_text(*parts: RenderableType, width: int = WIDTH) -> str:
    """The parts one below the other, without trailing blanks, ending in a newline unless empty.

    The terminal and the environment (COLUMNS, FORCE_COLOR, NO_COLOR) have no influence.
    """
    sheet = io.StringIO()
    console = Console(
        file=sheet,
        width=width,
        color_system=None,
        force_terminal=False,
        force_jupyter=False,
        force_interactive=False,
        legacy_windows=False,
        markup=False,
        emoji=False,
        highlight=False,
        # An empty environment, since rich would read the width and the colours from the real one.
        _environ={},
    )
    for part in parts:
        console.print(part)
    lines = [line.rstrip() for line in sheet.getvalue().split("\n")]
    return "\n".join(lines)


def wrapping_text(text: str) -> Text:
    """Text that wraps at blanks, and inside a word only where the word alone is too wide."""
    return Text(text, overflow="fold", no_wrap=False)


def columns(width: int) -> Table:
    """An empty grid of two columns: the first is `width` wide and never wraps, the second wraps in the rest."""
    grid = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    grid.add_column(width=width, no_wrap=True)
    grid.add_column(overflow="fold")
    return grid


def indent(text: str, by: int = MARGIN) -> str:
    """`text` with every line that is not empty moved `by` columns to the right."""
    return "".join(" " * by + line if line.strip() else line for line in text.splitlines(keepends=True))


def label_rows(rows: Iterable[tuple[str, str]], width: int = WIDTH) -> str:
    """Labels and their texts, indented by the margin; a text wraps in its own column, never under its label."""
    grid = columns(LABEL)
    for label, text in rows:
        grid.add_row(Text(label), wrapping_text(text))
    return indent(plain_text(grid, width=width - MARGIN)) if grid.row_count else ""


def last_lines(lines: tuple[str, ...], width: int = WIDTH) -> str:
    """The last SAID_LINES of `lines`, without control characters, each at most two lines of a label's text long."""
    return "\n".join(cut(line, 2 * (width - INDENT)) for line in lines[-SAID_LINES:])


def side_by_side(left_text: str, right_text: str, gap: int = 4, least_columns: int = 28, width: int = WIDTH) -> str:
    """`left_text` unchanged and `right_text` wrapped beside it, or below it if fewer than `least_columns` remain."""
    left_width = max((cell_len(line) for line in left_text.splitlines()), default=0)
    if not left_text or width - left_width - gap < least_columns:
        parts = [Text(part.rstrip("\n"), overflow="fold") for part in (left_text, right_text) if part]
        return "\n".join(plain_text(part, width=width) for part in parts)
    grid = columns(left_width + gap - 2)
    grid.add_row(Text(left_text.rstrip("\n")), wrapping_text(right_text))
    return plain_text(grid, width=width)
