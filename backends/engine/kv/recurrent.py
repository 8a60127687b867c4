"""RecurrentStates: the recurrent state of a request, one for each open row.

A KV cache keeps columns and a mask chooses among them. A recurrent state is a sum over a path: each row of a tree goes
on from the state of its parent, and a commit keeps the state of the last accepted row, whatever its depth or place.
"""

from collections import defaultdict
from collections.abc import Sequence

from specverify.backends.engine.kv.base import KvCache
from specverify.backends.engine.kv.state_slots import KEPT, Checkpoints, LayerState, LayerStates


class RecurrentStates:
    """The committed states of a request, and the states of the rows that a forward has opened.

    Outside a slot no tensor is changed in place: a row's state is made anew from that of the row above, so that states
    may be shared. In a slot each state is a copy in a cell of its own; those at borders leave it when their cell is
    needed.

    Attributes:
        length: Number of committed tokens.
        border: The states at multiples of this length are kept; 0 for none.
        states_by_length: The states after so many committed tokens. The last two lengths are kept, for a draft that
            feeds its root once more, and those at borders.
        parents: For each open row the row above it, -1 for the committed tokens.
        rows: For each recurrent layer, the state after each open row that has run.
        slot: The cells in which the states lie; None for tensors of their own.
        is_run: Whether the open rows are a run of tokens that will all be committed.
    """

    def __init__(self, border: int = 0) -> None:
        self.length = 0
        self.border = border
        self.states_by_length: dict[int, LayerStates] = {0: {}}
        self.parents: list[int] = []
        self.rows: dict[int, dict[int, LayerState]] = {}
        self.slot: Checkpoints | None = None
        self.is_run = False

    def lie_in(self, slot: Checkpoints) -> None:
        """Keep the states in the cells of `slot` from now on; no token is committed yet."""
        self.slot = slot
        self.states_by_length = {0: slot.clear()}

    @property
    def committed(self) -> LayerStates:
        """The states after the committed tokens."""
        return self.states_by_length[self.length]

    def open(self, parents: Sequence[int]) -> None:
        """Open a row for each of `parents`: the number of the open row above it, or -1 for the committed tokens."""
        self.parents += parents
        if self.slot is not None:
            self.slot.open(len(parents))

    def open_run(self, count: int) -> None:
        """Open `count` rows, each below the one before and the first below the committed tokens; all are committed."""
        if self.slot is not None and not self.parents:
            self.slot.open_run(count)
            self.is_run = True
            self.parents = list(range(-1, count - 1))
        else:
            self.open(range(-1, count - 1))

    def order(self, first: int) -> list[int]:
        """The open rows from `first` on, each after the row above it."""
        followers: dict[int, list[int]] = defaultdict(list)
        for row in range(first, len(self.parents)):
            followers[max(self.parents[row], first - 1)].append(row)
        ordered = list[int]()
        generation = followers[first - 1]
        while generation:
            ordered += generation
            generation = sorted(row for parent in generation for row in followers[parent])
        if len(ordered) < len(self.parents) - first:
            unreached = sorted(set(range(first, len(self.parents))) - set(ordered))
            raise ValueError(f"rows {unreached} follow no committed token")
        return ordered

    def above(self, layer: int, row: int) -> LayerState | None:
        """The state from which `row` goes on in `layer`; None for the state of zeros before the first token."""
        parent = self.parents[row]
        return self.committed.get(layer) if parent < 0 else self.rows[layer][parent]

    def put(self, layer: int, row: int, state: LayerState) -> None:
        """Note the state of `layer` after `row`."""
        if self.slot is not None:
            checkpoint = self.slot.write(layer, row, state)
            # A run takes cells by turns, and that of a border is taken again.
            is_overwritten = self.is_run and row < len(self.parents) - KEPT
            state = state if is_overwritten and self.is_border(self.length + row + 1) else checkpoint
        self.rows.setdefault(layer, {})[row] = state

    def is_border(self, length: int) -> bool:
        """Whether the states after `length` tokens are kept for the prefix cache."""
        return bool(self.border) and length % self.border == 0

    def commit(self, path: list[int]) -> None:
        """Commit the open rows `path`, in the order of their positions, and close the others."""
        for row in path:
            self.keep({layer: states_by_row[row] for layer, states_by_row in self.rows.items()})
        if self.slot is not None:
            self.slot.commit(path, self.length)
        self.close()

    def keep(self, states: LayerStates) -> None:
        """Commit one token, after which the states are `states`."""
        self.length += 1
        self.states_by_length[self.length] = states
        stale_length = self.length - KEPT
        if stale_length > 0 and not self.is_border(stale_length):
            self.states_by_length.pop(stale_length, None)
        elif self.slot is not None and stale_length in self.states_by_length:
            # Without a token the states are zeros, which nobody keeps.
            self.states_by_length[stale_length] = self.outside(stale_length) or {} if stale_length else {}

    def outside(self, length: int) -> LayerStates | None:
        """The states after `length` tokens, which stay whatever becomes of the slot; None where they are not kept."""
        states = self.states_by_length.get(length)
        if states is None or self.slot is None:
            return states
        return {layer: (window.clone(), memory.clone()) for layer, (window, memory) in states.items()}

    def close(self) -> None:
        """Close all open rows."""
        self.parents = []
        self.rows = {}
        self.is_run = False
        if self.slot is not None:
            self.slot.close()

    def crop(self, length: int) -> None:
        """Forget the committed tokens from `length` on, and every open row.

        Raises:
            ValueError: if no state of that length is kept.
        """
        if length not in self.states_by_length:
            raise ValueError(
                f"a recurrent state after {length} tokens is not kept, only {sorted(self.states_by_length)}"
            )
        self.states_by_length = {
            state_length: layer_states
            for state_length, layer_states in self.states_by_length.items()
            if state_length <= length
        }
        self.length = length
        if self.slot is not None:
            self.slot.crop(length)
        self.close()

    def begin_as(self, source: "RecurrentStates", length: int) -> None:
        """Begin with the states of `source` after `length` tokens."""
        if length not in source.states_by_length:
            raise ValueError(
                f"a recurrent state after {length} tokens is not kept, only {sorted(source.states_by_length)}"
            )
        self.begin(length, dict(source.states_by_length[length]))

    def begin(self, length: int, states: LayerStates) -> None:
        """Begin with `states` after `length` tokens."""
        self.length = length
        self.states_by_length = {0: {}, length: states if self.slot is None else self.slot.begin(length, states)}
        self.close()


def states_of(cache: KvCache) -> RecurrentStates | None:
    """The recurrent states that stand beside `cache`; None beside the cache of a model without them."""
    states = getattr(cache, "recurrent_states", None)
    assert states is None or isinstance(states, RecurrentStates)
    return states


def put_states_beside(cache: KvCache, states: RecurrentStates) -> RecurrentStates:
    """Put `states` beside `cache`, whose layout knows nothing of them, and return them."""
    cache.recurrent_states = states  # type: ignore[attr-defined]
    return states


def commit_states(cache: KvCache, path: list[int]) -> None:
    """Commit the recurrent states of the open rows `path`, where there are any beside `cache`."""
    states = states_of(cache)
    if states is not None:
        states.commit(path)


def crop_states(cache: KvCache, length: int) -> None:
    """Forget the recurrent states after more than `length` tokens, where there are any beside `cache`."""
    states = states_of(cache)
    if states is not None:
        states.crop(length)
