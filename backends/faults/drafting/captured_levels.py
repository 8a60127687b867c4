"""Faults of draft forwards over persistent buffers, padded to captured sizes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from backends.base import Unsupported
from backends.engine.captured.buffers import Buffers
from backends.engine.captured.lanes import LaneRows, Trash
from backends.engine.captured.runner import CapturedDrafts
from backends.engine.kv.base import KvCache
from backends.engine.seams import Seams
from backends.faults.fault import fault, faults_in
from reference.trace import Stage

CAPTURED = "cpu-captured-drafts"


def with_parts(seams: Seams, **parts: Any) -> Seams:
    """`seams` with other `parts` of captured draft forwards, by the names of `CapturedDrafts`.

    Raises:
        Unsupported: if the engine runs drafts one by one.
    """
    if not isinstance(seams.captured_drafts, CapturedDrafts):
        raise Unsupported("a fault of drafts over persistent buffers: this backend runs drafts one by one")
    return replace(seams, captured_drafts=replace(seams.captured_drafts, **parts))


@fault(
    "padded-lanes-write-live-slot",
    Stage.DRAFTED,
    "m0at/rvllm #32: padded entries reused KV slot 0; the same in vLLM #43810",
    "three requests that draft together: their forward is padded to four lanes",
    on=CAPTURED,
)
def padded_lanes_write(seams: Seams) -> Seams:
    """Padded lanes write their keys and values to the slots of the first live lane."""

    class Live(Trash):
        def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
            super().write(layer, keys, values)
            first = self.live()[0]
            rows = min(keys.shape[1], first.block(layer)[0].shape[1])
            held = [one.clone() for one in first.block(layer)]
            for cells, new in zip(held, (keys, values), strict=True):
                cells[:, -rows:] = new[:, :rows]
            first.amend(layer, *held)

    return with_parts(seams, trash=Live)


@fault(
    "padded-lanes-not-refreshed",
    Stage.DRAFTED,
    "sgl-project/sglang #10892: positions of padded lanes were those of an earlier batch; the same in #22958",
    "three requests that draft together: their forward is padded to four lanes",
    on=CAPTURED,
)
def padded_positions_stale(seams: Seams) -> Seams:
    """Padded lanes run with the positions that their buffers held before."""

    class Stale(Buffers):
        def pad(self, at: int, rows: int) -> None:
            before = self.positions[at].clone()
            super().pad(at, rows)
            self.positions[at] = before

    return with_parts(seams, buffers=Stale)


@fault(
    "lengths-of-level-before",
    Stage.DRAFTED,
    "family of sgl-project/sglang #26880: a padded draft graph replayed with lengths of another batch",
    "a draft with a cache and a tree of three levels",
    on=CAPTURED,
)
def lengths_stale(seams: Seams) -> Seams:
    """A lane that stays in use keeps the length of the level before, so that its newest columns are hidden."""

    class Stale(Buffers):
        def put(self, at: int, lane: LaneRows, number: int) -> None:
            before, held = int(self.lengths[at]), int(self.slots[at])
            super().put(at, lane, number)
            rows = len(lane.tokens)
            if held == number and 0 < before < int(self.lengths[at]) <= before + rows:
                self.lengths[at] = before

    return with_parts(seams, buffers=Stale)


@fault(
    "large-batch-by-smaller-graph",
    Stage.DRAFTED,
    "family of NVIDIA/TensorRT-LLM #16746: a graph was chosen for another size than that of its inputs",
    "three requests that draft together",
    on=CAPTURED,
)
def smaller_graph(seams: Seams) -> Seams:
    """A batch between two captured sizes is run by the graph of the smaller: the last lanes are not run."""

    def size(live: int, sizes: tuple[int, ...]) -> int | None:
        return max(one for one in sizes if one <= live)

    return with_parts(seams, size=size)


@fault(
    "outputs-of-last-lanes",
    Stage.DRAFTED,
    "family of ggml-org/llama.cpp #27009: what padded rows compute is never to be consumed",
    "three requests that draft together: their forward is padded to four lanes",
    on=CAPTURED,
)
def outputs_from_end(seams: Seams) -> Seams:
    """The outputs of a padded forward are read from its last lanes, the padded ones among them."""

    class FromEnd(Buffers):
        spare = 0

        def fill(self, lanes: list[LaneRows], numbers: list[int], size: int) -> None:
            super().fill(lanes, numbers, size)
            self.spare = size - len(lanes)

        def take(self, at: int, rows: int) -> Tensor:
            return super().take(at + self.spare, rows)

    return with_parts(seams, buffers=FromEnd)


@fault(
    "hidden-states-of-lane-before",
    Stage.DRAFTED,
    "family of sgl-project/sglang #18647: hidden states in the buffers of a draft's graph were stale",
    "a head with a tree of three levels",
    on=CAPTURED,
)
def hidden_states_stale(seams: Seams) -> Seams:
    """A lane that stays in use keeps the hidden states of the level before."""

    class Stale(Buffers):
        def put(self, at: int, lane: LaneRows, number: int) -> None:
            held = None if self.held is None or int(self.slots[at]) != number else self.held[at].clone()
            super().put(at, lane, number)
            if held is not None and self.held is not None:
                rows = held.isnan().flatten(1).any(1)
                self.held[at][~rows] = held[~rows]

    return with_parts(seams, buffers=Stale)


@fault(
    "shrunk-batch-by-old-indices",
    Stage.DRAFTED,
    "family of vLLM #7508: rows of hidden states were read by an index from before the batch was contracted",
    "two requests that draft together, and then the second one alone",
    on=CAPTURED,
)
def old_indices(seams: Seams) -> Seams:
    """Once a batch has shrunk, its outputs are read from the lanes that its requests had in the larger batch.

    A batch shrinks between two levels if one tree is complete, and between two steps if one request is absent.
    """

    class Shrunk(Buffers):
        larger: Sequence[KvCache] = ()
        places: Sequence[int] = ()

        def fill(self, lanes: list[LaneRows], numbers: list[int], size: int) -> None:
            super().fill(lanes, numbers, size)
            known = [id(cache) for cache in self.larger]
            mine = [id(lane.cache) for lane in lanes]
            if not {*mine} < {*known}:
                self.larger, known = [lane.cache for lane in lanes], mine
            self.places = [known.index(one) for one in mine]

        def take(self, at: int, rows: int) -> Tensor:
            return super().take(self.places[at], rows)

    return with_parts(seams, buffers=Shrunk)


FAULTS = faults_in(globals())
