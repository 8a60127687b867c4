"""Grids: pictures that are tables of cells: a mask, KV slots, a heat map.

A template draws a grid as an HTML table, so that a reader of the screen finds rows, columns and every cell by its
words.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SIDE = 24
"""Most rows, and most columns, of a grid: more are left out, those around the wrong cell last."""


@dataclass(frozen=True)
class Cell:
    """A cell.

    Attributes:
        state: The style of the cell: a class of the style sheet.
        text: The characters that it shows.
        words: The cell in words, for readers of the screen and as a hint.
        wrong: Whether the cell differs from what it must be.
        here: Whether the finding is about this cell.
    """

    state: str
    text: str
    words: str
    wrong: bool = False
    here: bool = False

    @property
    def style(self) -> str:
        """The classes of the cell."""
        return " ".join([self.state, *(["wrong"] if self.wrong else []), *(["here"] if self.here else [])])


@dataclass(frozen=True)
class Row:
    """A row of cells with its heading."""

    name: str
    cells: tuple[Cell, ...]
    here: bool = False


@dataclass(frozen=True)
class Grid:
    """A table of cells.

    Attributes:
        title: What the grid shows, in a few words.
        columns: The headings of the columns.
        rows: The rows, each with one cell for each column.
        corner: The heading of the column of row names.
        groups: Spans of columns under one heading: (heading, columns).
        left_out: What the grid leaves out, in words; empty where it shows everything.
        small: Whether cells are narrow, as in a mask.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    corner: str = ""
    groups: tuple[tuple[str, int], ...] = ()
    left_out: str = ""
    small: bool = True

    @property
    def wrong(self) -> int:
        """The number of wrong cells that are shown."""
        return sum(cell.wrong for row in self.rows for cell in row.cells)


def shown_indices(count: int, centres: Iterable[int], most: int = SIDE) -> list[int]:
    """The indices out of `count` to show: all where they fit, else `centres` and their neighbours, then the last ones.

    >>> shown_indices(100, [3], 6)
    [2, 3, 4, 97, 98, 99]
    """
    if count <= most:
        return list(range(count))
    indices: set[int] = set()
    for centre in [index for index in centres if 0 <= index < count]:
        neighbours = {index for index in (centre - 1, centre, centre + 1) if 0 <= index < count}
        if len(indices | neighbours) > most // 2 + 1:
            break
        indices |= neighbours
    for index in reversed(range(count)):
        if len(indices) >= most:
            break
        indices.add(index)
    return sorted(indices)


def omission(parts: Sequence[tuple[int, int, str]]) -> str:
    """The part that a grid leaves out, of parts (all, shown, noun): `of 80 columns 24 are shown`.

    >>> omission([(80, 24, "columns"), (3, 3, "rows")])
    'of 80 columns, 24 are shown'
    """
    return "; ".join(
        f"of {total} {noun}, {num_shown} are shown" for total, num_shown, noun in parts if num_shown < total
    )
