"""The persistent buffers of draft forwards, poisoned where no lane is in use.

A captured graph reads fixed addresses. So the buffers are allocated once, for the greatest capture size; each level of
each step is copied into them, and lanes that no request needs hold whatever was there before: here, poison.
"""

import torch
from torch import Tensor

from backends.engine.captured.lanes import LaneRows

POISON = -(2**40)
"""A token, a position, a length and a slot that no model and no cache has."""


class Buffers:
    """The inputs of the draft forwards of one model, and their outputs.

    Attributes:
        tokens, positions: int64 [lanes, rows].
        lengths: int64 [lanes]; the columns of each lane's cache before the rows of this forward.
        slots: int64 [lanes]; the number of each lane's request, by which its cache is found; 0 for a padded lane.
        held: [lanes, rows, modules, hidden], the states beside the tokens; None for a causal model.
        outputs: [lanes, rows, ...]; None before the first forward.
    """

    def __init__(self, lanes: int, rows: int, like: LaneRows) -> None:
        self.tokens, self.positions = (torch.full((lanes, rows), POISON) for _ in range(2))
        self.lengths, self.slots = (torch.full((lanes,), POISON) for _ in range(2))
        self.held: Tensor | None = None
        if like.held is not None:
            self.held = like.held.new_full((lanes, rows, *like.held.shape[1:]), torch.nan)
        self.outputs: Tensor | None = None

    def fill(self, lanes: list[LaneRows], numbers: list[int], size: int) -> None:
        """Copy `lanes`, of the requests `numbers`, pad them to `size` lanes, and poison every other lane."""
        self.retire(len(lanes))
        for at, (lane, number) in enumerate(zip(lanes, numbers, strict=True)):
            self.put(at, lane, number)
        rows = max(len(lane.tokens) for lane in lanes)
        for at in range(len(lanes), size):
            self.pad(at, rows)

    def retire(self, first: int) -> None:
        """Poison the lanes from `first` on, which are out of use."""
        for buffer in (self.tokens, self.positions, self.lengths, self.slots):
            buffer[first:] = POISON
        for numbers in (self.held, self.outputs):
            if numbers is not None:
                numbers[first:] = torch.nan

    def put(self, at: int, lane: LaneRows, number: int) -> None:
        """Copy the level of request `number` into lane `at`."""
        rows = len(lane.tokens)
        self.tokens[at, :rows], self.positions[at, :rows] = lane.tokens, lane.positions
        self.lengths[at], self.slots[at] = lane.cache.length + lane.cache.rows, number
        if self.held is not None and lane.held is not None:
            self.held[at, :rows] = lane.held

    def pad(self, at: int, rows: int) -> None:
        """Make lane `at` one that can be run and changes nothing: it writes to no request's cache."""
        self.tokens[at, :rows], self.positions[at, :rows], self.lengths[at], self.slots[at] = 0, 0, 0, 0
        if self.held is not None:
            self.held[at, :rows] = 0

    def refuse_poison(self, at: int, rows: int) -> None:
        """Raise ValueError if lane `at`, about to be run with `rows` rows, holds poison."""
        read = {
            "token": self.tokens[at, :rows],
            "position": self.positions[at, :rows],
            "length": self.lengths[at],
            "slot": self.slots[at],
        }
        for name, numbers in read.items():
            if bool((numbers == POISON).any()):
                raise ValueError(f"lane {at} of a draft's graph reads a stale {name}")
        if self.held is not None and bool(self.held[at, :rows].isnan().any()):
            raise ValueError(f"lane {at} of a draft's graph reads stale hidden states")

    def take(self, at: int, rows: int) -> Tensor:
        """A copy of the outputs of the first `rows` rows of lane `at`; the next forward overwrites the buffer."""
        assert self.outputs is not None
        return self.outputs[at, :rows].clone()
