"""WrittenChoices: what the rows took that wrote the columns of a cache.

It is experts, columns, and positions on three axes. No decode needs them: they are shown in traces, beside the numbers
that followed from them.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specverify.reference.trace import UNKNOWN_POSITION

UNKNOWN = -1
"""The number in place of a choice that is not known, and behind the columns of a row that has fewer than others."""


@dataclass(frozen=True)
class RowChoice:
    """The choices of one row; None for a kind that is not known, or that the model does not have.

    Attributes:
        experts: int64 [layers, taken].
        columns: int64 [layers, k]; the columns of the cache to which it attends, ascending, UNKNOWN behind them.
        axes: int64 [3]; its positions on time, height and width.
    """

    experts: Tensor | None = None
    columns: Tensor | None = None
    axes: Tensor | None = None


class WrittenChoices:
    """The choices of the rows that wrote the columns of a cache, by column.

    It stands beside a cache. A column that another request computed, or a forward that cannot be listened to, has none.
    """

    def __init__(self) -> None:
        self.rows: dict[int, RowChoice] = {}

    def write(self, first: int, rows: list[RowChoice]) -> None:
        """Note the choices of the rows that write the columns from `first` on, after which there are no others."""
        self.rows = {column: row for column, row in self.rows.items() if column < first}
        for place, row in enumerate(rows):
            if row.experts is not None or row.columns is not None or row.axes is not None:
                self.rows[first + place] = row

    def commit(self, length: int, path: list[int]) -> None:
        """Keep the open rows `path` behind the first `length` columns, in this order, and forget the others."""
        open_columns = [length + row for row in path]
        kept_rows = [self.rows.get(column) for column in open_columns]
        self.rows = {column: row for column, row in self.rows.items() if column < length}
        for place, row in enumerate(kept_rows):
            if row is not None:
                columns = None if row.columns is None else renumber(row.columns, length, open_columns[: place + 1])
                self.rows[length + place] = replace(row, columns=columns)

    def experts_of(self, columns: list[int]) -> Tensor | None:
        """The experts of `columns`, [layers, columns, taken], UNKNOWN where they are not; None if none is known."""
        return _side_by_side([self._row(column).experts for column in columns])

    def _row(self, column: int) -> RowChoice:
        return self.rows.get(column, RowChoice())

    def axes_of(self, columns: list[int]) -> Tensor | None:
        """The positions of `columns` on three axes, [3, columns]; None if none is known.

        UNKNOWN_POSITION stands where they are not.
        """
        rows = [self._row(column).axes for column in columns]
        if all(axes is None for axes in rows):
            return None
        return torch.stack([torch.full((3,), UNKNOWN_POSITION) if axes is None else axes for axes in rows], 1)

    def columns_of(self, length: int, paths: list[list[int]]) -> Tensor | None:
        """The columns of the first `length` columns and of open rows, by position: [layers, length + paths, k].

        A path holds the columns of an open row and of those above it, the root's first. UNKNOWN and None as for
        `experts_of`.
        """
        rows = [self._row(column).columns for column in range(length)]
        for path in paths:
            columns = self._row(path[-1]).columns
            rows.append(None if columns is None else renumber(columns, length, path))
        return _side_by_side(rows)


def renumber(columns: Tensor, length: int, open_columns: list[int]) -> Tensor:
    """`columns` [layers, k], with column `open_columns[d]` numbered as the one of position `length` + d.

    Columns before `length` keep their number, which is their position. Others lie on another path and have none: they
    are left out.
    """
    last = max(int(columns.max()), length - 1, *open_columns)
    # The last place is that of UNKNOWN, the index -1.
    positions = torch.full((last + 2,), UNKNOWN)
    positions[:length] = torch.arange(length)
    positions[open_columns] = torch.arange(length, length + len(open_columns))
    return ascending(positions[columns])


def ascending(columns: Tensor) -> Tensor:
    """`columns` [..., k] in ascending order, UNKNOWN behind them."""
    beyond = torch.iinfo(columns.dtype).max
    ordered = columns.masked_fill(columns == UNKNOWN, beyond).sort(-1)[0]
    return ordered.masked_fill(ordered == beyond, UNKNOWN)


def _side_by_side(rows: list[Tensor | None]) -> Tensor | None:
    """The choices of rows, [layers, k] each, as [layers, rows, widest k]."""
    known_rows = [row for row in rows if row is not None]
    if not known_rows:
        return None
    widest = max(row.shape[1] for row in known_rows)
    choices = torch.full((len(known_rows[0]), len(rows), widest), UNKNOWN)
    for place, row in enumerate(rows):
        if row is not None:
            choices[:, place, : row.shape[1]] = row
    return choices


def choices_beside(cache: Any) -> WrittenChoices:
    """The choices beside `cache`, whose layout knows nothing of them; empty ones are put there at the first call."""
    choices = getattr(cache, "written_choices", None)
    if choices is None:
        choices = cache.written_choices = WrittenChoices()
    assert isinstance(choices, WrittenChoices)
    return choices
