"""Faults that only a device shows, planted in the engine: each leaves a CPU run as it is.

They are what porting goes wrong by: numbers that stay on the host, waits inside a capture, buffers of a recording that
go stale or away, allocations that a replay does not make, work of streams that nothing orders.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specverify.backends.engine import overlap_server, tracing
from specverify.backends.engine.backend import EngineBackend
from specverify.backends.engine.columns import AttentionInputs
from specverify.backends.engine.handover.carrying import Carrying
from specverify.backends.engine.kv.lanes import BatchCache
from specverify.backends.engine.model import causal_lm, graphs
from specverify.backends.engine.model.causal_lm import CausalLm
from specverify.backends.engine.model.family.experts import ExactGroupRouter
from specverify.backends.engine.model.float64_modules import ExactRotary
from specverify.backends.engine.sampling.recorded import RecordedVerify

Plant = Callable[[pytest.MonkeyPatch, EngineBackend], None]
"""Plants a fault in the engine, or in an open backend of it."""


@dataclass(frozen=True)
class DeviceFault:
    """A fault that only a device shows.

    Attributes:
        name: Its name.
        plant: What plants it.
        backend: The backend of ours that it is planted in.
        case: The name of the case in which it shows.
        shown: The words by which it shows: of the refusal, of the fallback, or `other numbers`, or `more waits`.
    """

    name: str
    plant: Plant
    backend: str
    case: str
    shown: str


class HostBound:
    """A tensor that stays on the host: its `to` returns it."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def to(self, device: Any, **options: Any) -> Tensor:
        """The tensor, wherever it is asked to go."""
        return self._tensor


def stays(holder: Any, name: str) -> Plant:
    """The results of a function of the engine stay on the host."""

    def plant(patch: pytest.MonkeyPatch, _: EngineBackend) -> None:
        right = getattr(holder, name)
        patch.setattr(holder, name, lambda *arguments: HostBound(right(*arguments)))

    return plant


def plain_attributes(module: Any) -> Plant:
    """The buffers of a class of modules are plain attributes, which do not move with the model."""

    def plant(patch: pytest.MonkeyPatch, _: EngineBackend) -> None:
        patch.setattr(
            module, "register_buffer", lambda self, name, tensor, persistent=True: setattr(self, name, tensor)
        )

    return plant


def caches_on_the_host(patch: pytest.MonkeyPatch, _: EngineBackend) -> None:
    """KV caches are allocated on the CPU."""
    right = CausalLm.room
    patch.setattr(CausalLm, "room", lambda self, *sizes: replace(right(self, *sizes), device=torch.device("cpu")))


def carried_states_on_the_host(patch: pytest.MonkeyPatch, _: EngineBackend) -> None:
    """The hidden states of a request that was handed over stay where the packet was unpacked."""
    right = Carrying.carry_on

    def carry_on(self: Carrying, state: Any, steps: Any) -> None:
        right(self, state, steps)
        self._hidden = [] if state.hidden is None else [state.hidden]

    patch.setattr(Carrying, "carry_on", carry_on)


def attending(disturb: Callable[[Tensor, AttentionInputs], object]) -> Plant:
    """Attention that does something else first."""

    def plant(_: pytest.MonkeyPatch, backend: EngineBackend) -> None:
        attend = backend.seams.attend

        def disturb_attend(query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
            disturb(query, columns)
            return attend(query, columns, scaling)

        backend.seams = replace(backend.seams, attend=disturb_attend)

    return plant


def on_a_side_stream(_: pytest.MonkeyPatch, backend: EngineBackend) -> None:
    """Attention runs on a stream of its own, and nothing waits for it."""
    attend = backend.seams.attend

    def on_side_stream(query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            return attend(query, columns, scaling)

    backend.seams = replace(backend.seams, attend=on_side_stream)


def recording_by(**methods: Any) -> Plant:
    """Recordings of forwards with other methods."""

    def plant(patch: pytest.MonkeyPatch, _: EngineBackend) -> None:
        for name, method in methods.items():
            patch.setattr(graphs.Graphs, name, method)

    return plant


def refill_without(*names: str) -> Any:
    """A `refill` that forgets the inputs with these names."""
    right = graphs.Graphs.refill

    def refill(self: Any, recording: Any, fresh: Any) -> None:
        inputs = {name: tensor for name, tensor in recording.inputs.items() if not name.startswith(names)}
        right(self, replace(recording, inputs=inputs), fresh)

    return refill


def key_without_addresses() -> Any:
    """A key of recordings that forgets over which buffers they read and write."""
    right = graphs.Graphs.key

    def key(self: Any, attend: Any, fresh: Any, lanes: Any) -> Any:
        return replace(right(self, attend, fresh, lanes), addresses=())

    return key


def recorder_with(record: Callable[[Any, Any], Any]) -> Plant:
    """A recorder of graphs that records in another way."""

    def plant(patch: pytest.MonkeyPatch, _: EngineBackend) -> None:
        patch.setattr(graphs.CudaRecorder, "record", record)

    return plant


def capture_run(run: Callable[[], list[Tensor]]) -> tuple[list[Tensor], torch.cuda.CUDAGraph]:
    """The results of a capture of `run`, and its graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return results, graph


def results_of_the_warm_up(self: Any, run: Any) -> Any:
    """The results are tensors outside the pool of the graph, which no replay writes."""
    results = run()
    _, graph = capture_run(run)
    return results, graph.replay


def replay_in_python(self: Any, run: Any) -> Any:
    """A replay that runs the forward again: it allocates its results anew."""
    results, _ = capture_run(run)
    return results, lambda: run()


def replay_that_is_forgotten(self: Any, run: Any) -> Any:
    """Nothing is replayed: what the capture left in its pool is read."""
    results, _ = capture_run(run)
    return results, lambda: None


def warm_up_unawaited(self: Any, run: Any) -> Any:
    """The warm-up runs on a side stream for which the current one does not wait."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        results = run()
    return results, lambda: None


def buffers_that_go(patch: pytest.MonkeyPatch, _: EngineBackend) -> None:
    """A recording keeps copies of its input tensors; those that the graph reads are freed."""
    right = graphs.Graphs._record

    def record(self: Any, *arguments: Any) -> Any:
        recording = right(self, *arguments)
        return replace(recording, inputs={name: tensor.clone() for name, tensor in recording.inputs.items()})

    patch.setattr(graphs.Graphs, "_record", record)


def stale_coins(patch: pytest.MonkeyPatch, _: EngineBackend) -> None:
    """Acceptance is replayed with the coins of the step that was recorded."""
    right = RecordedVerify.refill

    def refill(self: Any, recording: Any, batch: Any) -> None:
        right(self, recording, replace(batch, uniforms=recording.inputs[8]))

    patch.setattr(RecordedVerify, "refill", refill)


class Unordered(overlap_server.CudaStream):
    """A stream of launches that waits for nothing."""

    def launch(self, work: Any) -> Any:
        with torch.cuda.stream(self._stream):
            result = work()
            event = self._stream.record_event()
        torch.cuda.current_stream().wait_event(event)
        return result, event.synchronize


class Unawaited(overlap_server.CudaStream):
    """A stream of launches for which the default stream does not wait."""

    def launch(self, work: Any) -> Any:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = work()
            event = self._stream.record_event()
        return result, event.synchronize


def read_before_arrival(patch: pytest.MonkeyPatch, _: EngineBackend) -> None:
    """A trace reads tensors that are still being copied to the host."""

    def array(tensor: Tensor) -> Any:
        return tensor.detach().to("cpu", non_blocking=True).numpy().copy()

    patch.setattr(tracing, "array", array)


def index_from_the_host(_: Tensor, columns: AttentionInputs) -> object:
    return columns.key[:, :, torch.arange(columns.key.shape[2])]


NOT_CAPTURED = "not captured: "
MIXED = "MixedDevices"
RACE = "Race"

FAULTS = (
    # Numbers that stay on the host.
    DeviceFault("tokens-on-the-host", stays(causal_lm, "side_by_side"), "cuda-eager", "tree", MIXED),
    DeviceFault("positions-on-the-host", stays(causal_lm, "positions_of"), "cuda-eager", "tree", MIXED),
    DeviceFault("masks-on-the-host", stays(BatchCache, "masks"), "cuda-fused-sdpa", "tree", MIXED),
    DeviceFault("caches-on-the-host", caches_on_the_host, "cuda-eager", "tree", MIXED),
    DeviceFault("rotary-table-on-the-host", plain_attributes(ExactRotary), "cuda-eager", "float64", MIXED),
    DeviceFault("router-bias-on-the-host", plain_attributes(ExactGroupRouter), "cuda-eager", "experts", MIXED),
    DeviceFault("carried-states-on-the-host", carried_states_on_the_host, "cuda-eager", "hand-over", MIXED),
    DeviceFault("index-on-the-host", attending(index_from_the_host), "cuda-eager", "tree", "more waits"),
    # Waits inside a capture.
    DeviceFault(
        "read-in-capture", attending(lambda query, _: float(query.sum())), "cuda-fused-graphs", "static", NOT_CAPTURED
    ),
    DeviceFault(
        "branch-in-capture",
        attending(lambda _, columns: bool(columns.visible.all())),
        "cuda-fused-graphs",
        "static",
        NOT_CAPTURED,
    ),
    DeviceFault(
        "subscript-in-capture",
        attending(lambda _, columns: columns.visible[columns.visible]),
        "cuda-fused-graphs",
        "static",
        NOT_CAPTURED,
    ),
    DeviceFault(
        "download-in-capture",
        attending(lambda _, columns: columns.visible.cpu()),
        "cuda-fused-graphs",
        "static",
        NOT_CAPTURED,
    ),
    DeviceFault(
        "constant-in-capture",
        attending(lambda query, _: torch.tensor([1.0], device=query.device)),
        "cuda-fused-graphs",
        "static",
        NOT_CAPTURED,
    ),
    DeviceFault(
        "synchronize-in-capture",
        attending(lambda *_: torch.cuda.synchronize()),
        "cuda-fused-graphs",
        "static",
        NOT_CAPTURED,
    ),
    # Buffers that go stale or away.
    DeviceFault(
        "positions-not-refilled", recording_by(refill=refill_without("position_ids")), "cuda-fused-graphs", "static",
        "other numbers",
    ),
    DeviceFault(
        "slots-not-refilled", recording_by(refill=refill_without("slots")), "cuda-fused-graphs", "static",
        "other numbers",
    ),
    DeviceFault(
        "buffers-of-another-request", recording_by(key=key_without_addresses()), "cuda-fused-graphs", "two",
        "other numbers",
    ),
    DeviceFault("inputs-freed", buffers_that_go, "cuda-fused-graphs", "static", "freed since its capture"),
    DeviceFault("coins-not-refilled", stale_coins, "cuda-fused-graphs", "sampled", "other numbers"),
    # Allocations that a replay does not make.
    DeviceFault(
        "results-of-the-warm-up", recorder_with(results_of_the_warm_up), "cuda-fused-graphs", "static", "other numbers"
    ),
    DeviceFault("replay-in-python", recorder_with(replay_in_python), "cuda-fused-graphs", "static", "other numbers"),
    DeviceFault(
        "replay-forgotten", recorder_with(replay_that_is_forgotten), "cuda-fused-graphs", "static", "other numbers"
    ),
    # Work that nothing orders.
    DeviceFault("warm-up-unawaited", recorder_with(warm_up_unawaited), "cuda-fused-graphs", "static", RACE),
    DeviceFault("attention-on-a-side-stream", on_a_side_stream, "cuda-eager", "tree", RACE),
    DeviceFault(
        "capture-on-a-side-stream", on_a_side_stream, "cuda-fused-graphs", "static", "Race"
    ),
    DeviceFault("read-before-arrival", read_before_arrival, "cuda-eager", "tree", "Unsynchronised"),
)  # fmt: skip
"""The faults, by their five kinds."""
