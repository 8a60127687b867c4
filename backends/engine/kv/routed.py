"""RoutedColumns: the experts of the rows that wrote the columns of a cache.

No decode needs them: they are shown in traces, beside the numbers that followed from them.
"""

from typing import Any

import torch
from torch import Tensor


class RoutedColumns:
    """The experts of the rows that wrote the columns of a cache, [layers, taken] by column.

    It stands beside a cache. A column that another request computed, or a forward that cannot be listened to, has none.
    """

    def __init__(self) -> None:
        self.columns: dict[int, Tensor] = {}

    def write(self, first: int, rows: Tensor | None, count: int) -> None:
        """Note the experts `rows` [layers, count, taken] of the `count` columns from `first` on; None: not known."""
        for column in [column for column in self.columns if column >= first]:
            del self.columns[column]
        for row in range(count if rows is not None else 0):
            assert rows is not None
            self.columns[first + row] = rows[:, row]

    def commit(self, length: int, path: list[int]) -> None:
        """Keep the open rows `path` behind the first `length` columns, in this order, and forget the others."""
        kept_rows = [self.columns.get(length + row) for row in path]
        self.columns = {column: row for column, row in self.columns.items() if column < length}
        self.columns |= {length + place: row for place, row in enumerate(kept_rows) if row is not None}

    def experts_of(self, columns: list[int]) -> Tensor | None:
        """The experts of `columns`, [layers, columns, taken], -1 for those that are not known; None if none is."""
        known_row = next(iter(self.columns.values()), None)
        if known_row is None:
            return None
        unknown_row = torch.full_like(known_row, -1)
        return torch.stack([self.columns.get(column, unknown_row) for column in columns], dim=1)


def routed_columns_of(cache: Any) -> RoutedColumns:
    """The experts beside `cache`, whose layout knows nothing of them; empty ones are put there at the first call."""
    columns = getattr(cache, "routed_columns", None)
    if columns is None:
        columns = cache.routed_columns = RoutedColumns()
    assert isinstance(columns, RoutedColumns)
    return columns
