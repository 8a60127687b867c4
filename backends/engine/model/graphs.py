"""The recording and replay of whole verify and draft forwards, for CUDA graphs.

A forward is recorded once for each combination of shape, buffers and attention, then replayed. If a forward cannot be
recorded, the reason is returned in place of logits. A recording is dropped when one of its caches ceases to exist, or
the pool of their pages.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from specverify.backends.engine.columns import Attend, AttentionInputs
from specverify.backends.engine.kv.lanes import BatchCache
from specverify.backends.engine.model.recording.lanes import REFUSAL, RecordedLanes, recorded_lanes

KEEP = 16
"""The largest number of recordings kept; the least recently replayed one is dropped first."""

HOOKED = "not captured: a replay runs no hook, which an adapter and a draft that reads hidden states need"

Inputs = dict[str, Any]
"""Tensors of a forward by name: input_ids, position_ids and attention_mask (a dict by kind of layer, or one tensor)."""

Forward = Callable[[Inputs, BatchCache, Attend], Tensor]
"""A model's forward: logits [B, T, vocabulary]."""


class Recorder(Protocol):
    """Records the work of a call on a device, and replays it without Python."""

    def record(self, run: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
        """Call `run`, perhaps more than once, and record its work.

        Returns:
            The result tensors of `run`, and a function that computes them again, in place, from the input tensors of
            the recorded call.

        Raises:
            RuntimeError: if an operation in `run` cannot be recorded.
        """
        ...


class CudaRecorder:
    """A recorder that captures CUDA graphs."""

    def record(self, run: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
        """Warm up on a side stream, as torch requires before a capture, then capture.

        A capture that is refused something ends inside torch, which then leaves its own stream current, and the random
        generator as if the capture went on: both are put back. The tests run this on a pretended device alone.
        """
        before = torch.cuda.current_stream()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(before)
        with torch.cuda.stream(side):
            for _ in range(2):
                run()
        before.wait_stream(side)
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        state = generator.clone_state()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                results = run()
        except BaseException:
            torch.cuda.set_stream(before)
            generator.graphsafe_set_state(state)
            raise
        return results, graph.replay


@dataclass(frozen=True)
class Key:
    """The key under which a recording is kept: all that a replay cannot change.

    Attributes:
        attend: The attention.
        shapes: The shapes of the inputs.
        addresses: The address of each cache's first buffer or of its pool, which no other living one has.
    """

    attend: Attend
    shapes: tuple[tuple[int, ...], ...]
    addresses: tuple[int, ...]


@dataclass(frozen=True)
class Recording:
    """A recorded forward; the caller refills `inputs` in place, then `replay` recomputes `logits` and `heads`.

    Attributes:
        fallbacks: What the attention of each layer announced; a replay runs no Python, and takes the same paths.
    """

    inputs: dict[str, Tensor]
    logits: Tensor
    heads: list[Tensor]
    replay: Callable[[], None]
    fallbacks: tuple[str, ...] = ()


class Graphs:
    """The recordings of one model; a planted fault replaces one of the methods `key`, `find`, `refill` and `results`.

    Attributes:
        recorder: What records a forward.
        recordings: The recordings, the least recently replayed one first.
        refusals: The reason why a forward cannot be recorded, by the key of the forward.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.recordings: OrderedDict[Key, Recording] = OrderedDict()
        self.refusals: dict[Key, str] = {}

    def run(
        self, forward: Forward, inputs: Inputs, batch: BatchCache, attend: Attend
    ) -> tuple[Tensor, list[Tensor]] | str:
        """Replay the forward, and record it first if its shape, buffers or attention are new.

        Args:
            forward: The model's forward.
            inputs: The inputs, on the device.
            batch: The batch of caches, with the rows of this forward open.
            attend: The attention.

        Returns:
            Copies of the logits [B, T, vocabulary] and of each layer's heads [B, H, T, D]; or the reason why the
            forward is not recorded.
        """
        lanes = recorded_lanes(batch)
        if lanes is None:
            return REFUSAL
        inputs = with_masks(inputs, lanes.widen_mask)
        places = lanes.current_places()
        fresh = named_tensors(inputs, places)
        key = self.key(attend, fresh, lanes)
        if key in self.refusals:
            return self.refusals[key]
        recording = self.find(key)
        if recording is None:
            try:
                recording = self.recordings[key] = self._record(forward, inputs, lanes, places, attend)
            except RuntimeError as error:
                self.refusals[key] = f"not captured: {' '.join(str(error).split())[:160]}"
                return self.refusals[key]
            # The addresses of a cache or pool that is gone may become those of another one.
            for owner in lanes.owners:
                weakref.finalize(owner, self.recordings.pop, key, None).atexit = False
            while len(self.recordings) > KEEP:
                self.recordings.popitem(last=False)
        self.refill(recording, fresh)
        recording.replay()
        batch.fallbacks += recording.fallbacks
        return self.results(recording)

    def key(self, attend: Attend, fresh: dict[str, Tensor], lanes: RecordedLanes) -> Key:
        """The key of a forward; a replay reads and writes fixed addresses, so other buffers need another recording."""
        shapes = tuple(tuple(tensor.shape) for tensor in fresh.values())
        return Key(attend, (*shapes, lanes.widths), lanes.addresses)

    def find(self, key: Key) -> Recording | None:
        """The recording to replay for `key`, now the most recently replayed one; None if there is none."""
        if key in self.recordings:
            self.recordings.move_to_end(key)
        return self.recordings.get(key)

    def refill(self, recording: Recording, fresh: dict[str, Tensor]) -> None:
        """Copy every input of this forward into the tensors that a replay reads."""
        for name, buffer in recording.inputs.items():
            buffer.copy_(fresh[name])

    def results(self, recording: Recording) -> tuple[Tensor, list[Tensor]]:
        """Copies of the logits and the heads, because the next replay overwrites these tensors."""
        return recording.logits.clone(), [head.clone() for head in recording.heads]

    def _record(
        self, forward: Forward, inputs: Inputs, lanes: RecordedLanes, places: dict[str, Tensor], attend: Attend
    ) -> Recording:
        buffers: Inputs = {
            name: tensor if isinstance(tensor, dict) else tensor.clone() for name, tensor in inputs.items()
        }
        buffers = with_masks(buffers, Tensor.clone)
        lanes.places = {name: place.clone() for name, place in places.items()}
        heads: list[Tensor] = []

        def watched(query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
            heads.append(attend(query, columns, scaling))
            return heads[-1]

        def run() -> list[Tensor]:
            # The recorder calls `run` more than once; the last call is recorded.
            heads.clear()
            lanes.fallbacks.clear()
            return [forward(buffers, lanes, watched), *heads]

        (logits, *results), replay = self.recorder.record(run)
        return Recording(named_tensors(buffers, lanes.places), logits, results, replay, tuple(lanes.fallbacks))


def with_masks(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """The inputs with `change` of each mask, of which there is one, or one for each kind of layer."""
    masks = inputs["attention_mask"]
    changed_masks = {kind: change(mask) for kind, mask in masks.items()} if isinstance(masks, dict) else change(masks)
    return {**inputs, "attention_mask": changed_masks}


def named_tensors(inputs: Inputs, places: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a forward by name: its inputs, one mask for each kind of layer, and the places of each lane."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in sorted(inputs.items()):
        tensors |= (
            {f"{name} {kind}": mask for kind, mask in tensor.items()} if isinstance(tensor, dict) else {name: tensor}
        )
    return tensors | places
