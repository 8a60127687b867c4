"""The branch layout, which speculates in replicas of the committed cache.

While rows are open, a branch replicates the committed cache and takes the rows. The commit copies the accepted rows
back (branch and commit of EAGLE-Pangu). With several branches, the {B_i} of EAGLE-Pangu, each holds the rows of one
path of the tree in storage of its own, and all share the committed columns; a commit replays one and drops them all.
"""

import os
from collections.abc import Iterator

import torch
from torch import Tensor

from specverify.backends.engine.kv.base import (
    CacheSpec,
    KvCache,
    Pair,
    Poison,
    is_in_order,
    pick_columns,
    poison_of_width,
)
from specverify.reference.layout import FAST_SWITCH, NO_PREFIX, NOT_IN_ORDER


class Branch:
    """Committed tensors and, while rows are open, a branch whose rows share no storage with them.

    The argument `way` names the way of the commit. `path` gathers the prefix and the accepted rows from the branch.
    `fast` leaves the committed prefix in place and appends the accepted rows alone; it falls back to `path` on any
    boundary or shape inconsistency. `length` crops the branch, which is correct only if the accepted rows are the first
    rows of the block; otherwise it falls back to `path`.

    Attributes:
        committed_pairs: Keys and values of the committed columns, by layer: views of the beginning of buffers with room
            for `capacity` columns, so that `fast` writes only the accepted rows, however long the prefix is.
        branch: The replica with the open rows, by layer; the committed columns themselves in a layer whose rows are not
            written yet; empty while no row is open.
        way: The way that the last commit took, set where its rows were copied; None before the first commit.
    """

    def __init__(self, room: CacheSpec, way: str) -> None:
        self._how = way
        self._buffers = [room.empty(room.capacity, layer) for layer in range(room.layers)]
        self.committed_pairs: list[Pair] = [_columns(buffer, 0, 0) for buffer in self._buffers]
        self.branch: list[Pair] = []
        self.way: str | None = None
        self.layers = room.layers
        self.latent = room.latent
        self.index_widths = room.index_widths
        self.codec = room.codec
        self.length = 0
        self.rows = 0
        self.most_rows = 0

    def open(self, rows: int) -> None:
        """Begin a branch unless rows are open already, and announce `rows` further rows.

        A layer's replica is made when its first rows are written, by the copy that puts them behind the committed
        columns: a replica made here would be copied once more.
        """
        if not self.rows:
            self.branch = list(self.committed_pairs)
        self.rows += rows

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Append the rows to the branch, in storage of its own."""
        branch_pair = self.branch[layer]
        self.branch[layer] = torch.cat([branch_pair[0], keys], -2), torch.cat([branch_pair[1], values], -2)

    def read(self, layer: int) -> Pair:
        """The branch, or the committed columns while no row is open."""
        return (self.branch or self.committed_pairs)[layer]

    def first(self, layer: int) -> int:
        """0: this layout keeps every column."""
        return 0

    def cell_mask(self, layer: int, visible: Tensor) -> Tensor:
        """`visible` unchanged: `read` returns the logical columns in order."""
        return visible

    def block(self, layer: int) -> Pair:
        """See `KvCache.block`."""
        keys, values = self.read(layer)
        return keys[..., self.length :, :].clone(), values[..., self.length :, :].clone()

    def amend(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """See `KvCache.amend`."""
        self.branch[layer] = tuple(  # type: ignore[assignment]
            torch.cat([cells[..., : self.length, :], rows], -2)
            for cells, rows in zip(self.branch[layer], (keys, values), strict=True)
        )

    def commit(self, path: list[int]) -> str | None:
        """See `KvCache.commit`."""
        if not self.rows:
            return None
        way, reason = self.way_of(path)
        self.bring_home(path, way)
        return reason

    def bring_home(self, path: list[int], way: str) -> None:
        """Write the rows `path` of the branch to the committed cache by the way `way`, and close the branch."""
        rows = [self.length + row for row in path]
        end = self.length + len(path)
        for layer, pair in enumerate(self.branch):
            # `way` is set beside the copy, not beside the choice: it shows which copy really ran.
            if way == "fast":
                self.way = "fast"
                self.put(layer, self.length, pick_columns(pair, rows))
            elif way == "length":
                self.way = "length"
                self.put(layer, 0, _columns(pair, 0, end))
            else:
                self.way = "path"
                self.put(layer, 0, pick_columns(pair, [*range(self.length), *rows]))
        self.length = end
        self.branch = []
        self.rows = 0
        self.committed_pairs = [_columns(buffer, 0, end) for buffer in self._buffers]

    def put(self, layer: int, begin: int, pair: Pair) -> None:
        """Write the columns `pair` from column `begin` on.

        A buffer of another shape or dtype, or one that is too short, is replaced; the columns before `begin` are kept.
        """
        old_buffer = self._buffers[layer]
        end = begin + pair[0].shape[-2]
        if any(_differ(cells, tensor) or cells.shape[-2] < end for cells, tensor in zip(old_buffer, pair, strict=True)):
            columns = max(end, old_buffer[0].shape[-2])
            keys, values = (tensor.new_zeros((*tensor.shape[:-2], columns, tensor.shape[-1])) for tensor in pair)
            self._buffers[layer] = keys, values
            if begin:
                self.put(layer, 0, _columns(old_buffer, 0, begin))
        for buffer, tensor in zip(self._buffers[layer], pair, strict=True):
            buffer[..., begin:end, :] = tensor

    def way_of(self, path: list[int]) -> tuple[str, str | None]:
        """The way of this commit, and the reason if it is not the way asked for."""
        # Read at every commit, so that a change of the switch takes effect at once.
        switch = os.environ.get(FAST_SWITCH)
        if self._how == "length":
            return ("length", None) if is_in_order(path) else ("path", NOT_IN_ORDER)
        if self._how == "fast" and switch == "0":
            return "path", f"{FAST_SWITCH}=0"
        if self._how == "fast" or switch == "1":
            reason = cannot_share(self.committed_pairs, self.branch, self.length) or self._moved_reason()
            return ("fast", None) if reason is None else ("path", reason)
        return "path", None

    def _moved_reason(self) -> str | None:
        """The reason, if a layer's committed columns are not in the buffer to which `fast` appends; else None."""
        for index, (committed, buffer) in enumerate(zip(self.committed_pairs, self._buffers, strict=True)):
            # Equal addresses mean that `committed_pairs` is still a view of the beginning of the buffer.
            if any(
                tensor.data_ptr() != its_buffer.data_ptr() for tensor, its_buffer in zip(committed, buffer, strict=True)
            ):
                return f"layer {index} of the committed cache lies elsewhere"
        return None

    def crop(self, length: int) -> None:
        """See `KvCache.crop`."""
        self.committed_pairs = [_columns(pair, 0, length) for pair in self.committed_pairs]
        self.length = length
        self.rows = 0
        self.branch = []

    def begin_as(self, source: KvCache) -> None:
        """See `KvCache.begin_as`."""
        self.length = source.length
        for layer in range(self.layers):
            self.put(layer, 0, source.committed_columns(layer)[1:])
        self.committed_pairs = [_columns(buffer, 0, self.length) for buffer in self._buffers]

    def committed_columns(self, layer: int) -> tuple[int, Tensor, Tensor]:
        """All committed columns, from column 0; see `KvCache.committed_columns`."""
        keys, values = self.committed_pairs[layer]
        return 0, keys.clone(), values.clone()

    def poison(self, number: Poison) -> None:
        """Fill the cells after the committed columns."""
        for pair in self._buffers:
            for buffer in pair:
                buffer[..., self.length :, :] = poison_of_width(number, buffer, self.codec)

    def release(self) -> None:
        """See `KvCache.release`."""
        self.crop(0)


def _columns(pair: Pair, begin: int, end: int) -> Pair:
    return pair[0][..., begin:end, :], pair[1][..., begin:end, :]


def _differ(tensor: Tensor, other_tensor: Tensor) -> bool:
    return tensor.shape[:-2] != other_tensor.shape[:-2] or tensor.dtype != other_tensor.dtype


def cannot_share(committed: list[Pair], branch: list[Pair], length: int) -> str | None:
    """The reason why the committed prefix may not stay in place under the branch's rows; None if every layer agrees."""
    if not length:
        return NO_PREFIX
    if len(committed) != len(branch):
        return f"{len(committed)} committed layers under {len(branch)} of the branch"
    for index, (committed_pair, branch_pair) in enumerate(zip(committed, branch, strict=True)):
        if any(tensor.shape[-2] != length for tensor in committed_pair):
            return f"layer {index} holds {committed_pair[0].shape[-2]} columns, the cache {length}"
        if _differ(committed_pair[0], branch_pair[0]):
            return f"layer {index} of the branch has another shape or dtype"
        if branch_pair[0].shape[-2] < length:
            return f"layer {index} of the branch is shorter than the prefix"
    return None


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
                if source is not None and ancestor < self._first:
                    for layer in range(self.layers):
                        keys, values = self.cells[source][layer][ancestor]
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
