"""The runner of draft levels by capture size, over persistent buffers.

A server captures the draft's forward for a few batch sizes. A batch is padded up to the next of them. One beyond the
greatest runs without a capture, and the run counts it as a fallback. The captures are emulated: forwards read the
buffers as graphs would, through fixed views of them, but every forward is launched anew and no graph is recorded.

A captured graph reads fixed addresses. So the buffers are allocated once, for the greatest capture size; each level of
each step is copied into them, and lanes that no request needs hold whatever was there before: here, poison.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specverify.backends.engine.captured.lanes import LaneModel, LaneRows, PaddingCache
from specverify.backends.engine.columns import Attend
from specverify.backends.engine.kv.base import KvCache
from specverify.backends.engine.kv.lanes import BatchCache

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


SIZES = (1, 2, 4, 8)
"""The batch sizes for which drafts are captured."""


def capture_size(live: int, sizes: tuple[int, ...]) -> int | None:
    """The smallest of the ascending `sizes` that holds `live` lanes; None beyond the greatest."""
    i = bisect_left(sizes, live)
    return sizes[i] if i < len(sizes) else None


@dataclass(frozen=True)
class CapturedDrafts:
    """The parts of captured draft forwards; a fault replaces one of them.

    Attributes:
        sizes: The captured batch sizes, ascending.
        size: From a number of lanes and the captured sizes to the size that is run; None to run without a capture.
        buffers: The class of the persistent buffers.
        padding_cache: The class of the cache of padded lanes.
        output_lane: From the number of a request among those of a forward, and their count, to the lane of its outputs.
    """

    sizes: tuple[int, ...] = SIZES
    size: Callable[[int, tuple[int, ...]], int | None] = capture_size
    buffers: type[Buffers] = Buffers
    padding_cache: type[PaddingCache] = PaddingCache
    output_lane: Callable[[int, int], int] = lambda request, num_live: request


class LevelRunner:
    """Runs the levels of the requests of a server, model by model.

    Attributes:
        buffers: The buffers of each model.
        replays: Number of forwards of each captured size.
    """

    def __init__(self, parts: CapturedDrafts, rows: int) -> None:
        self.parts = parts
        self.rows = rows
        self.buffers: dict[int, Buffers] = {}
        self.replays: dict[int, int] = {}
        self._live: list[KvCache] = []
        self.padding_cache = parts.padding_cache(lambda: self._live)

    def run(
        self, model: LaneModel, lanes: dict[int, LaneRows], attend: Attend, batch: type[BatchCache]
    ) -> dict[int, Tensor]:
        """The outputs [R, ...] of the levels `lanes`, each by the number of its request in the step, from 1 on."""
        numbers = list(lanes)
        rows = list(lanes.values())
        size = self.parts.size(len(rows), self.parts.sizes)
        self._live = [lane.cache for lane in rows]
        if size is None:
            fallback = f"not captured: a draft level of {len(rows)} requests; captures end at {self.parts.sizes[-1]}"
            model.fallbacks[fallback] += model.attending
            return dict(zip(numbers, model.run_lanes(rows, attend, batch), strict=True))
        buffers = self._buffers(model, rows[0])
        buffers.fill(rows[:size], numbers[:size], size)
        outputs = model.run_lanes(self._read(buffers, lanes, rows, size), attend, batch)
        self._write(buffers, outputs)
        self.replays[size] = self.replays.get(size, 0) + 1
        lanes_by_request = [self.parts.output_lane(i, len(rows)) for i in range(len(rows))]
        return {
            number: buffers.take(lane, len(lanes[number].tokens))
            for number, lane in zip(numbers, lanes_by_request, strict=True)
        }

    def _buffers(self, model: LaneModel, example: LaneRows) -> Buffers:
        if id(model) not in self.buffers:
            self.buffers[id(model)] = self.parts.buffers(self.parts.sizes[-1], self.rows, example)
        return self.buffers[id(model)]

    def _read(self, buffers: Buffers, lanes: dict[int, LaneRows], rows: list[LaneRows], size: int) -> list[LaneRows]:
        """The `size` lanes as a graph finds them in the buffers; masks come with the request that a slot names."""
        widest = max(len(lane.tokens) for lane in rows)
        lanes_read = []
        for lane in range(size):
            count = len(rows[lane].tokens) if lane < len(rows) else widest
            buffers.refuse_poison(lane, count)
            tokens, positions = buffers.tokens[lane, :count], buffers.positions[lane, :count]
            hidden = None if buffers.hidden_states is None else buffers.hidden_states[lane, :count]
            read = replace(rows[0], tokens=tokens, positions=positions, hidden_states=hidden)
            number = int(buffers.slots[lane])
            if number:
                lanes_read.append(self._request_rows(read, lanes[number], buffers.lengths[lane]))
            else:
                lanes_read.append(self.padding_cache.lane(read))
        return lanes_read

    def _request_rows(self, read: LaneRows, lane: LaneRows, length: Tensor) -> LaneRows:
        """The rows `read` over the cache of the request of `lane`, which ends at `length` columns and these rows."""
        columns = torch.arange(lane.visible[0].shape[1])
        visible = [visible_columns & (columns < length + len(read.tokens)) for visible_columns in lane.visible]
        return replace(read, visible=visible, cache=lane.cache, parents=lane.parents)

    def _write(self, buffers: Buffers, outputs: list[Tensor]) -> None:
        """Write the outputs of each lane to the buffer, which is allocated by the first forward."""
        if buffers.outputs is None:
            shape = (self.parts.sizes[-1], self.rows, *outputs[0].shape[1:])
            buffers.outputs = outputs[0].new_full(shape, torch.nan)
        for lane, output in enumerate(outputs):
            buffers.outputs[lane, : len(output)] = output
