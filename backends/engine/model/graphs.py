"""Graphs: a whole verify forward recorded once for its shape and buffers, then replayed; or the reason why not."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from backends.engine.columns import Attend, AttentionInputs
from backends.engine.kv.base import KvCache
from backends.engine.kv.lanes import BatchCache
from backends.engine.kv.overwrite import Overwrite
from backends.engine.kv.static import Static

KEEP = 16
"""Recordings kept; the one that was replayed longest ago goes first."""

Inputs = dict[str, Any]
"""Tensors of a forward by name: input_ids, position_ids, and attention_mask, by kind of layer where there are kinds."""

Forward = Callable[[Inputs, BatchCache, Attend], Tensor]
"""A model's forward: logits [B, T, vocabulary]."""


class Recorder(Protocol):
    """Records the work of a call on a device, and replays it without Python."""

    def record(self, run: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
        """Run it, perhaps more than once; its results, and what fills these very tensors anew from the same inputs.

        Raises:
            RuntimeError: where something in it cannot be recorded.
        """
        ...


class CudaRecorder:
    """torch.cuda's graphs."""

    def record(self, run: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
        """Warm up on a side stream, as torch asks before a capture, then capture.

        Untested where no NVIDIA device is.
        """
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = run()
        return results, graph.replay


class Still(BatchCache):
    """Lanes of static caches whose rows are written where `slots` says, so that no Python number is recorded.

    Attributes:
        slots: int64 [rows] for each lane, on the device: the columns that its rows are written to.
    """

    def __init__(self, caches: list[KvCache], rows: list[int], filler: float = 0.0) -> None:
        super().__init__(caches, rows, filler)
        self.slots: list[Tensor] = []

    @property
    def static(self) -> list[Static] | None:
        """The caches, if all keep their columns in static buffers that attention reads from end to end."""
        still = [one for one in self._caches if isinstance(one, Static) and not isinstance(one, Overwrite)]
        return still if len(still) == len(self._caches) else None

    def _write(self, lane: int, layer: int, keys: Tensor, values: Tensor) -> None:
        cache = self._caches[lane]
        assert isinstance(cache, Static)
        for buffer, new in zip(cache.buffers[layer], (keys, values), strict=True):
            buffer.index_copy_(-2, self.slots[lane], new)


@dataclass(frozen=True)
class Recording:
    """One forward on the device: `inputs` are refilled in place, `replay` fills `logits` and `heads` from them."""

    inputs: list[Tensor]
    logits: Tensor
    heads: list[Tensor]
    replay: Callable[[], None]


class Graphs:
    """The recordings of one model.

    Attributes:
        refused: Why some forwards are not recorded, by what they run.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._kept: OrderedDict[Any, Recording] = OrderedDict()
        self.refused: dict[Any, str] = {}

    def run(self, forward: Forward, inputs: Inputs, lanes: Still, attend: Attend) -> tuple[Tensor, list[Tensor]] | str:
        """Replay the forward, recording it first where its shape, buffers or attention are new.

        Args:
            forward: The model.
            inputs: On the device.
            lanes: The batch, its rows open.
            attend: The attention.

        Returns:
            Logits [B, T, vocabulary] and each layer's heads [B, H, T, D], copies both; or why it is not recorded.
        """
        caches = lanes.static
        if caches is None:
            return "not captured: only layout static hands attention the same tensors in every step"
        device = caches[0].buffers[0][0].device
        slots = [torch.arange(one.length, one.length + one.rows, device=device) for one in caches]
        fresh = [*_tensors(inputs), *slots]
        key = (
            attend,
            tuple(tuple(one.shape) for one in fresh),
            tuple(buffer.data_ptr() for one in caches for buffer in one.buffers[0]),
        )
        if key in self.refused:
            return self.refused[key]
        if key not in self._kept:
            try:
                self._kept[key] = self._record(forward, inputs, lanes, slots, attend)
            except RuntimeError as error:
                self.refused[key] = f"not captured: {' '.join(str(error).split())[:160]}"
                return self.refused[key]
            while len(self._kept) > KEEP:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        recording = self._kept[key]
        for held, new in zip(recording.inputs, fresh, strict=True):
            held.copy_(new)
        recording.replay()
        return recording.logits.clone(), [one.clone() for one in recording.heads]

    def _record(self, forward: Forward, inputs: Inputs, lanes: Still, slots: list[Tensor], attend: Attend) -> Recording:
        held: Inputs = {
            name: {kind: mask.clone() for kind, mask in one.items()} if isinstance(one, dict) else one.clone()
            for name, one in inputs.items()
        }
        lanes.slots = [one.clone() for one in slots]
        heads: list[Tensor] = []

        def watched(query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
            heads.append(attend(query, columns, scaling))
            return heads[-1]

        def run() -> list[Tensor]:
            heads.clear()
            return [forward(held, lanes, watched), *heads]

        (logits, *results), replay = self._recorder.record(run)
        return Recording([*_tensors(held), *lanes.slots], logits, results, replay)


def _tensors(inputs: Inputs) -> list[Tensor]:
    """The tensors of named inputs in a fixed order."""
    found: list[Tensor] = []
    for _, one in sorted(inputs.items()):
        found += [mask for _, mask in sorted(one.items())] if isinstance(one, dict) else [one]
    return found
