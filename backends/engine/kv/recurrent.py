"""RecurrentStates: the recurrent state of a request, one for each open row.

A KV cache keeps columns and a mask chooses among them. A recurrent state is a sum over a path: each row of a tree goes
on from the state of its parent, and a commit keeps the state of the last accepted row, whatever its depth or place.
"""

from collections.abc import Sequence

from torch import Tensor

from specverify.backends.engine.kv.base import KvCache

LayerState = tuple[Tensor, Tensor]
"""The window of a layer's convolution [width - 1, channels], and its memory [value heads, key width, value width]."""

LayerStates = dict[int, LayerState]
"""The state of each recurrent layer; no entry for a layer that has not run: it begins with zeros."""


class RecurrentStates:
    """The committed states of a request, and the states of the rows that a forward has opened.

    No tensor is changed in place: a row's state is made anew from that of the row above, so that states may be shared.

    Attributes:
        length: Number of committed tokens.
        border: The states at multiples of this length are kept; 0 for none.
        states_by_length: The states after so many committed tokens. The last two lengths are kept, for a draft that
            feeds its root once more, and those at borders.
        parents: For each open row the row above it, -1 for the committed tokens.
        rows: For each recurrent layer, the state after each open row that has run.
    """

    def __init__(self, border: int = 0) -> None:
        self.length = 0
        self.border = border
        self.states_by_length: dict[int, LayerStates] = {0: {}}
        self.parents: list[int] = []
        self.rows: dict[int, dict[int, LayerState]] = {}

    @property
    def committed(self) -> LayerStates:
        """The states after the committed tokens."""
        return self.states_by_length[self.length]

    def open(self, parents: Sequence[int]) -> None:
        """Open a row for each of `parents`: the number of the open row above it, or -1 for the committed tokens."""
        self.parents += parents

    def order(self, first: int) -> list[int]:
        """The open rows from `first` on, each after the row above it."""
        rows = list(range(first, len(self.parents)))
        ordered = list[int]()
        while rows:
            ready = [row for row in rows if self.parents[row] < first or self.parents[row] in ordered]
            if not ready:
                raise ValueError(f"rows {rows} follow no committed token")
            ordered += ready
            rows = [row for row in rows if row not in ready]
        return ordered

    def above(self, layer: int, row: int) -> LayerState | None:
        """The state from which `row` goes on in `layer`; None for the state of zeros before the first token."""
        parent = self.parents[row]
        return self.committed.get(layer) if parent < 0 else self.rows[layer][parent]

    def put(self, layer: int, row: int, state: LayerState) -> None:
        """Note the state of `layer` after `row`."""
        self.rows.setdefault(layer, {})[row] = state

    def commit(self, path: list[int]) -> None:
        """Commit the open rows `path`, in the order of their positions, and close the others."""
        for row in path:
            self.keep({layer: states_by_row[row] for layer, states_by_row in self.rows.items()})
        self.close()

    def keep(self, states: LayerStates) -> None:
        """Commit one token, after which the states are `states`."""
        self.length += 1
        self.states_by_length[self.length] = states
        stale_length = self.length - 2
        if stale_length > 0 and not (self.border and stale_length % self.border == 0):
            self.states_by_length.pop(stale_length, None)

    def close(self) -> None:
        """Close all open rows."""
        self.parents = []
        self.rows = {}

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
        self.states_by_length = {0: {}, length: states}
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
