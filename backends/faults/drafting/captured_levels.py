"""Faults of draft forwards over persistent buffers, padded to captured sizes."""

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from specverify.backends.engine.captured.lanes import LaneRows, PaddingCache
from specverify.backends.engine.captured.runner import Buffers, CapturedDrafts
from specverify.backends.engine.kv.base import KvCache
from specverify.backends.faults.fault import drafted_fault, in_place_of

CAPTURED_BACKEND = "cpu-captured-drafts"

captured_fault = partial(drafted_fault, on=CAPTURED_BACKEND)

in_captured_drafts = partial(
    in_place_of,
    owner=CapturedDrafts,
    refusal="a fault of drafts over persistent buffers: this backend runs drafts one by one",
)
"""A decorator as `in_place_of`, for a part of captured draft forwards."""


@captured_fault(
    "padded-lanes-write-live-slot",
    "m0at/rvllm #32: padded entries reused KV slot 0; the same in vLLM #43810",
    "three requests that draft together: their forward is padded to four lanes",
)
@in_captured_drafts("captured_drafts.padding_cache")
class Live(PaddingCache):
    """Padded lanes write their keys and values to the slots of the first live lane."""

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        super().write(layer, keys, values)
        first = self.live()[0]
        rows = min(keys.shape[1], first.block(layer)[0].shape[1])
        columns = [cells.clone() for cells in first.block(layer)]
        for cells, new in zip(columns, (keys, values), strict=True):
            cells[:, -rows:] = new[:, :rows]
        first.amend(layer, *columns)


@captured_fault(
    "padded-lanes-not-refreshed",
    "sgl-project/sglang #10892: positions of padded lanes were those of an earlier batch; the same in #22958",
    "three requests that draft together: their forward is padded to four lanes",
)
@in_captured_drafts("captured_drafts.buffers")
class Stale(Buffers):
    """Padded lanes run with the positions that their buffers held before."""

    def pad(self, lane_number: int, rows: int) -> None:
        before = self.positions[lane_number].clone()
        super().pad(lane_number, rows)
        self.positions[lane_number] = before


@captured_fault(
    "lengths-of-level-before",
    "family of sgl-project/sglang #26880: a padded draft graph replayed with lengths of another batch",
    "a draft with a cache and a tree of three levels",
)
@in_captured_drafts("captured_drafts.buffers")
class LengthsStale(Buffers):
    """A lane that stays in use keeps the length of the level before, so that its newest columns are hidden."""

    def put(self, place: int, lane: LaneRows, number: int) -> None:
        before = int(self.lengths[place])
        slot_before = int(self.slots[place])
        super().put(place, lane, number)
        rows = len(lane.tokens)
        if slot_before == number and 0 < before < int(self.lengths[place]) <= before + rows:
            self.lengths[place] = before


@captured_fault(
    "large-batch-by-smaller-graph",
    "family of NVIDIA/TensorRT-LLM #16746: a graph was chosen for another size than that of its inputs",
    "three requests that draft together",
)
@in_captured_drafts("captured_drafts.size")
def smaller_graph(drafts: CapturedDrafts, live: int, sizes: tuple[int, ...]) -> int | None:
    """A batch between two captured sizes is run by the graph of the smaller: the last lanes are not run."""
    return max(captured_size for captured_size in sizes if captured_size <= live)


@captured_fault(
    "outputs-of-last-lanes",
    "family of ggml-org/llama.cpp #27009: what padded rows compute is never to be consumed",
    "three requests that draft together: their forward is padded to four lanes",
)
@in_captured_drafts("captured_drafts.buffers")
class FromEnd(Buffers):
    """The outputs of a padded forward are read from its last lanes, the padded ones among them."""

    spare = 0

    def fill(self, lanes: list[LaneRows], numbers: list[int], size: int) -> None:
        super().fill(lanes, numbers, size)
        self.spare = size - len(lanes)

    def take(self, place: int, rows: int) -> Tensor:
        return super().take(place + self.spare, rows)


@captured_fault(
    "hidden-states-of-lane-before",
    "family of sgl-project/sglang #18647: hidden states in the buffers of a draft's graph were stale",
    "a head with a tree of three levels",
)
@in_captured_drafts("captured_drafts.buffers")
class HiddenStatesStale(Buffers):
    """A lane that stays in use keeps the hidden states of the level before."""

    def put(self, place: int, lane: LaneRows, number: int) -> None:
        states_before = (
            None
            if self.hidden_states is None or int(self.slots[place]) != number
            else self.hidden_states[place].clone()
        )
        super().put(place, lane, number)
        if states_before is not None and self.hidden_states is not None:
            rows = states_before.isnan().flatten(1).any(1)
            self.hidden_states[place][~rows] = states_before[~rows]


@captured_fault(
    "shrunk-batch-by-old-indices",
    "family of vLLM #7508: rows of hidden states were read by an index from before the batch was contracted",
    "two requests that draft together, and then the second one alone",
)
@in_captured_drafts("captured_drafts.buffers")
class Shrunk(Buffers):
    """Once a batch has shrunk, its outputs are read from the lanes that its requests had in the larger batch.

    A batch shrinks between two levels if one tree is complete, and between two steps if one request is absent.
    """

    larger: Sequence[KvCache] = ()
    places: Sequence[int] = ()

    def fill(self, lanes: list[LaneRows], numbers: list[int], size: int) -> None:
        super().fill(lanes, numbers, size)
        cache_ids_before = [id(cache) for cache in self.larger]
        cache_ids = [id(lane.cache) for lane in lanes]
        if not {*cache_ids} < {*cache_ids_before}:
            self.larger = [lane.cache for lane in lanes]
            cache_ids_before = cache_ids
        self.places = [cache_ids_before.index(cache_id) for cache_id in cache_ids]

    def take(self, place: int, rows: int) -> Tensor:
        return super().take(self.places[place], rows)
