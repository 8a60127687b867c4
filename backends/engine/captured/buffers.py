"""The persistent buffers of draft forwards, poisoned where no lane is in use.

A captured graph reads fixed addresses. So the buffers are allocated once, for the greatest capture size; each level of
each step is copied into them, and lanes that no request needs hold whatever was there before: here, poison.
"""

import torch
from torch import Tensor

from specverify.backends.engine.captured.lanes import LaneRows

POISON = -(2**40)
"""A token, a position, a length and a slot that no model and no cache has."""


class Buffers:
    """The inputs of the draft forwards of one model, and their outputs.

    Attributes:
        tokens, positions: int64 [lanes, rows].
        lengths: int64 [lanes]; the columns of each lane's cache before the rows of this forward.
        slots: int64 [lanes]; the number of each lane's request, by which its cache is found; 0 for a padded lane.
        hidden_states: [lanes, rows, modules, hidden], the states beside the tokens; None for a causal model.
        outputs: [lanes, rows, ...]; None before the first forward.
    """

    def __init__(self, lanes: int, rows: int, example: LaneRows) -> None:
        self.tokens, self.positions = (torch.full((lanes, rows), POISON) for _ in range(2))
        self.lengths, self.slots = (torch.full((lanes,), POISON) for _ in range(2))
        self.hidden_states: Tensor | None = None
        if example.hidden_states is not None:
            self.hidden_states = example.hidden_states.new_full(
                (lanes, rows, *example.hidden_states.shape[1:]), torch.nan
            )
        self.outputs: Tensor | None = None

    def fill(self, lanes: list[LaneRows], numbers: list[int], size: int) -> None:
        """Copy `lanes`, of the requests `numbers`, pad them to `size` lanes, and poison every other lane."""
        self.retire(len(lanes))
        for row, (lane, number) in enumerate(zip(lanes, numbers, strict=True)):
            self.put(row, lane, number)
        rows = max(len(lane.tokens) for lane in lanes)
        for row in range(len(lanes), size):
            self.pad(row, rows)

    def retire(self, first: int) -> None:
        """Poison the lanes from `first` on, which are out of use."""
        for buffer in (self.tokens, self.positions, self.lengths, self.slots):
            buffer[first:] = POISON
        for numbers in (self.hidden_states, self.outputs):
            if numbers is not None:
                numbers[first:] = torch.nan

    def put(self, row: int, lane: LaneRows, number: int) -> None:
        """Copy the level of request `number` into lane `row`."""
        rows = len(lane.tokens)
        self.tokens[row, :rows] = lane.tokens
        self.positions[row, :rows] = lane.positions
        self.lengths[row] = lane.cache.length + lane.cache.rows
        self.slots[row] = number
        if self.hidden_states is not None and lane.hidden_states is not None:
            self.hidden_states[row, :rows] = lane.hidden_states

    def pad(self, row: int, rows: int) -> None:
        """Make lane `row` one that can be run and changes nothing: it writes to no request's cache."""
        self.tokens[row, :rows] = 0
        self.positions[row, :rows] = 0
        self.lengths[row] = 0
        self.slots[row] = 0
        if self.hidden_states is not None:
            self.hidden_states[row, :rows] = 0

    def refuse_poison(self, row: int, rows: int) -> None:
        """Raise ValueError if lane `row`, about to be run with `rows` rows, holds poison."""
        numbers_by_name = {
            "token": self.tokens[row, :rows],
            "position": self.positions[row, :rows],
            "length": self.lengths[row],
            "slot": self.slots[row],
        }
        for name, numbers in numbers_by_name.items():
            if bool((numbers == POISON).any()):
                raise ValueError(f"lane {row} of a draft's graph reads a stale {name}")
        if self.hidden_states is not None and bool(self.hidden_states[row, :rows].isnan().any()):
            raise ValueError(f"lane {row} of a draft's graph reads stale hidden states")

    def take(self, row: int, rows: int) -> Tensor:
        """A copy of the outputs of the first `rows` rows of lane `row`; the next forward overwrites the buffer."""
        assert self.outputs is not None
        return self.outputs[row, :rows].clone()
