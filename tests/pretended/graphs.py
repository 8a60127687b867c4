"""CUDA graphs of the pretended device: a capture runs nothing, a replay computes on the addresses of the capture."""

import weakref
from collections.abc import Callable
from typing import Any

import torch

from tests.pretended.ledger import LEDGER
from tests.pretended.streams import HOST, current_stream
from tests.pretended.tensor import Capture, Memory, Underway, touch


class GeneratorState:
    """The state of a random generator, as far as captures go.

    Attributes:
        capturing: Whether a capture is under way; of one that ended in an error, for ever.
    """

    capturing = False


class Graph:
    """In the place of `torch.cuda.CUDAGraph`."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._operations: list[Callable[[], None]] | None = None
        self._random: list[Any] = []
        self._outside: list[weakref.ref[Memory]] = []
        self._pool: list[Memory] = []

    def capture_begin(self, *pool: Any, **options: Any) -> None:
        """Begin to capture on the current stream, which may not be the default one."""
        stream = current_stream()
        if stream is HOST.streams[0]:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        if Underway.capture is not None:
            raise RuntimeError("a capture is under way")
        Underway.capture = Capture(self, stream)
        self._random = [generator.state for generator in torch.cuda.default_generators]  # type: ignore[attr-defined]
        for state in self._random:
            state.capturing = True

    def capture_end(self) -> None:
        """End the capture; one that was refused something ends in an error, as CUDA's do."""
        capture = Underway.capture
        if capture is None:
            raise RuntimeError("no capture is under way")
        Underway.capture = None
        with torch._C._DisableTorchDispatch():
            capture.undo()
        if capture.broken is not None:
            LEDGER.note("aborted capture")
            raise RuntimeError("operation failed due to a previous error during capture")
        for state in self._random:
            state.capturing = False
        LEDGER.note("capture")
        self._operations = capture.operations
        self._outside = [weakref.ref(memory) for memory in capture.outside.values()]
        self._pool = capture.pool

    def replay(self) -> None:
        """Compute again on the same addresses; nothing is allocated, and no Python of the model runs."""
        if self._operations is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        memories = [memory() for memory in self._outside]
        alive = [memory for memory in memories if memory is not None]
        if len(alive) < len(memories):
            raise RuntimeError(
                f"a replay uses {len(memories) - len(alive)} allocations that were freed since its capture"
            )
        used = [*alive, *self._pool]
        touch(used, used, "a replay")
        with torch._C._DisableTorchDispatch():
            for compute in self._operations:
                compute()
        LEDGER.note("replay")

    def reset(self) -> None:
        """Forget the capture."""
        self._operations = None

    def pool(self) -> tuple[int, int]:
        """The name of the graph's pool."""
        return (id(self), 0)
