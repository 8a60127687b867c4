"""Several branch caches of one request over one committed cache.

They follow the branches {B_i} of EAGLE-Pangu. Each branch holds the rows of one path of the tree in storage of its own;
all share the committed columns. A commit replays the rows of one branch into the committed cache and drops all the
branches.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from specverify.backends.engine.kv.base import CacheSpec, Pair
from specverify.backends.engine.kv.branch import Branch

Cells = dict[int, Pair]
"""For each row of a branch its keys and values, [kv_heads, width]."""


class Branches(Branch):
    """The branch layout with up to `most` branches; the last one takes all paths for which there is no other.

    Attributes:
        most: The most branches at once.
        paths: For each branch its rows, in the order in which they were opened.
        cells: For each branch and layer, the rows that the branch holds.
    """

    def __init__(self, room: CacheSpec, way: str, most: int) -> None:
        super().__init__(room, way)
        self.most = most
        self.paths: list[list[int]] = []
        self.cells: list[list[Cells]] = []
        self._first = 0
        self._parents: list[int] | None = None

    def open(self, rows: int) -> None:
        """Announce `rows` further rows, a chain unless `divide` says otherwise."""
        self._first = self.rows
        self.rows += rows
        self._parents = list(range(self._first - 1, self.rows - 1))

    def divide(self, parents: list[int]) -> None:
        """Say which open row stands above each of the rows opened last; -1 for the committed columns."""
        self._parents = list(parents)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write each of the rows opened last to every branch that holds it."""
        if self._parents is not None:
            parents = self._parents
            self._parents = None
            self.assign(dict(zip(range(self._first, self.rows), parents, strict=True)))
        for branch, row in self.holders(self._first):
            i = row - self._first
            self.cells[branch][layer][row] = keys[:, i].clone(), values[:, i].clone()

    def holders(self, first: int) -> Iterator[tuple[int, int]]:
        """Each branch with each of its rows from `first` on."""
        return ((branch, row) for branch, path in enumerate(self.paths) for row in path if row >= first)

    def assign(self, parents: dict[int, int]) -> None:
        """Share the new rows out: a row goes on in the branch that ends above it, or begins a branch of its own."""
        unassigned = list(parents)
        while unassigned:
            row = next((candidate for candidate in unassigned if parents[candidate] not in unassigned), unassigned[0])
            unassigned.remove(row)
            ends = [branch for branch, path in enumerate(self.paths) if path[-1] == parents[row]]
            if ends:
                self.paths[ends[0]].append(row)
            else:
                self._fork(parents[row], row)

    def _fork(self, parent: int, row: int) -> None:
        """Begin a branch with the rows down to `parent`, then `row`; in the last branch, if there are `most`."""
        source = self.home(parent) if parent >= 0 else None
        path = [] if source is None else self.paths[source][: self.paths[source].index(parent) + 1]
        if len(self.paths) < self.most:
            self.paths.append([])
            self.cells.append([{} for _ in range(self.layers)])
        last = len(self.paths) - 1
        for ancestor in path:
            if ancestor not in self.paths[last]:
                self.paths[last].append(ancestor)
                for layer in range(self.layers) if source is not None and ancestor < self._first else ():
                    keys, values = self.cells[source][layer][ancestor]  # type: ignore[index]
                    self.cells[last][layer][ancestor] = keys.clone(), values.clone()
        self.paths[last].append(row)

    def home(self, row: int) -> int:
        """The first branch that holds `row`."""
        return next(branch for branch, path in enumerate(self.paths) if row in path)

    def read(self, layer: int) -> Pair:
        """The committed columns, then each open row from a branch that holds it."""
        if not self.rows:
            return self.committed_pairs[layer]
        return self.join_rows(layer, [self.cells[self.home(row)][layer][row] for row in range(self.rows)])

    def join_rows(self, layer: int, rows: list[Pair]) -> Pair:
        """The committed columns of a layer, then `rows`."""
        keys, values = self.committed_pairs[layer]
        if not rows:
            return keys.clone(), values.clone()
        return (
            torch.cat([keys, torch.stack([key for key, _ in rows], 1)], -2),
            torch.cat([values, torch.stack([value for _, value in rows], 1)], -2),
        )

    def amend(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """See `KvCache.amend`."""
        for branch, row in self.holders(0):
            self.cells[branch][layer][row] = keys[:, row].clone(), values[:, row].clone()

    def commit(self, path: list[int]) -> str | None:
        """Replay the rows `path` from the branch of the last of them, by the way of the layout; drop all branches."""
        if not self.rows:
            return None
        self.branch = [self.join_rows(layer, self.replay_rows(layer, path)) for layer in range(self.layers)]
        way, reason = self.way_of(path)
        self.bring_home(list(range(len(path))), way)
        self.drop()
        return reason

    def replay_rows(self, layer: int, path: list[int]) -> list[Pair]:
        """The rows `path` from the branch that holds the last one; a row that it lacks comes from another branch.

        A rule that takes siblings with one token for one candidate may accept rows of two branches.
        """
        winner = self.home(path[-1]) if path else 0
        winner_cells = self.cells[winner][layer]
        return [winner_cells[row] if row in winner_cells else self.cells[self.home(row)][layer][row] for row in path]

    def drop(self) -> None:
        """Forget every branch."""
        self.paths = []
        self.cells = []

    def crop(self, length: int) -> None:
        """See `KvCache.crop`."""
        super().crop(length)
        self.drop()
