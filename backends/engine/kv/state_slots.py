"""Recurrent states in slots of a pool of fixed size, with a checkpoint for each speculative row.

A request owns one slot while it has caches. In the pool of each model the slot has the same cells: two for the states
after the last two committed tokens, and one for each row of the largest block, which is that row's checkpoint. A commit
copies nothing: it notes the cells of the last accepted rows (vLLM gives a request a state for each drafted token and
one more; SGLang's pool keeps a checkpoint for each node that is verified).
"""

from collections import deque
from collections.abc import Iterable

from torch import Tensor

LayerState = tuple[Tensor, Tensor]
"""The window of a layer's convolution [width - 1, channels], and its memory [value heads, key width, value width]."""

LayerStates = dict[int, LayerState]
"""The state of each recurrent layer; no entry for a layer that has not run: it begins with zeros."""

KEPT = 2
"""Committed lengths whose states are kept: a draft feeds its root once more."""


class StateSlots:
    """Hands out the numbers of slots, each to one owner at a time.

    Attributes:
        total: Number of slots; 0 where each request keeps its states in tensors of its own.
        queue: The free slots, the next one first.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.queue = deque(range(total))

    @property
    def free(self) -> tuple[int, ...]:
        """The free slots, the next one first."""
        return tuple(self.queue)

    def take(self) -> int | None:
        """Hand out the next free slot; None if there is none."""
        return self.queue.popleft() if self.queue else None

    def give_back(self, slot: int) -> None:
        """Take back `slot`, which is handed out next."""
        self.queue.appendleft(slot)


class RecurrentPool:
    """The cells of all slots for the recurrent layers of one model.

    Attributes:
        slots: Number of slots.
        cells: Cells of each slot.
        layers: For each layer that has run the windows and the memories of all cells, [slots * cells, ...] each.
    """

    def __init__(self, slots: int, rows: int) -> None:
        self.slots = slots
        # A run of committed tokens needs two cells in turn, however small the trees are.
        self.cells = KEPT + max(rows, 2)
        self.layers: LayerStates = {}

    def cells_of(self, slot: int) -> range:
        """The cells of `slot`."""
        return range(slot * self.cells, (slot + 1) * self.cells)

    def write(self, layer: int, cell: int, state: LayerState) -> LayerState:
        """Copy `state` to `cell`; return the cell's own tensors."""
        if layer not in self.layers:
            window, memory = (part.new_zeros((self.slots * self.cells, *part.shape)) for part in state)
            self.layers[layer] = window, memory
        for cells, part in zip(self.layers[layer], state, strict=True):
            cells[cell] = part
        return self.read(layer, cell)

    def read(self, layer: int, cell: int) -> LayerState:
        """The tensors of `cell`, which change with it."""
        windows, memories = self.layers[layer]
        return windows[cell], memories[cell]

    def fill(self, cells: Iterable[int], number: float) -> None:
        """Write `number` everywhere in `cells`."""
        places = list(cells)
        for parts in self.layers.values():
            for part in parts:
                part[places] = number


class Checkpoints:
    """The slot of one request in the pool of one model.

    Attributes:
        pool: The pool.
        slot: The number of the slot.
        committed: The cells of the states after the last committed tokens, by the number of those.
        rows: The cell of each open row.
    """

    def __init__(self, pool: RecurrentPool, slot: int) -> None:
        self.pool = pool
        self.slot = slot
        self.committed: dict[int, int] = {}
        self.rows: list[int] = []
        self._last = self.cells[0]

    @property
    def cells(self) -> range:
        """All cells of the slot."""
        return self.pool.cells_of(self.slot)

    def clear(self) -> LayerStates:
        """Begin without a token: a cell of zeros, whatever the owner before has left."""
        cell = self.cells[0]
        self.committed, self.rows = {0: cell}, []
        self.pool.fill([cell], 0.0)
        return {layer: self.pool.read(layer, cell) for layer in self.pool.layers}

    def begin(self, length: int, states: LayerStates) -> LayerStates:
        """Begin with a copy of `states` after `length` tokens; return the copy."""
        cell = self.cells[0]
        self.committed, self.rows = {length: cell}, []
        return {layer: self.pool.write(layer, cell, state) for layer, state in states.items()}

    def free_cells(self) -> list[int]:
        """The cells that hold neither a committed state nor a checkpoint, in turn behind the last one taken."""
        used = {*self.committed.values(), *self.rows}
        behind = self._last - self.cells[0] + 1
        return [cell for cell in (*self.cells[behind:], *self.cells[:behind]) if cell not in used]

    def open(self, count: int) -> None:
        """Give each of `count` further rows a cell for its checkpoint.

        Raises:
            ValueError: if the slot has too few free cells.
        """
        free = self.free_cells()
        if count > len(free):
            raise ValueError(f"{count} rows need checkpoints, and the slot of recurrent states has {len(free)}")
        self._take(free[:count])

    def open_run(self, count: int) -> None:
        """Give `count` rows that will all be committed cells by turns: each is read by the row behind it alone."""
        free = self.free_cells()
        self._take([free[row % len(free)] for row in range(count)])

    def _take(self, cells: list[int]) -> None:
        self.rows += cells
        self._last = cells[-1] if cells else self._last

    def write(self, layer: int, row: int, state: LayerState) -> LayerState:
        """Write the checkpoint of an open row; return it as it stands in the pool."""
        return self.pool.write(layer, self.rows[row], state)

    def commit(self, path: list[int], length: int) -> None:
        """Note the cells of the open rows `path`, the last one that of `length` committed tokens."""
        begin = length - len(path) + 1
        self.committed |= {begin + place: self.rows[row] for place, row in enumerate(path)}
        self.committed = {count: cell for count, cell in self.committed.items() if length - KEPT < count <= length}

    def crop(self, length: int) -> None:
        """Forget the states after more than `length` tokens."""
        self.committed = {count: cell for count, cell in self.committed.items() if count <= length}

    def close(self) -> None:
        """Free the checkpoints of all open rows."""
        self.rows = []
