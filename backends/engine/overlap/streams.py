"""Streams of launched work: at once on a CPU, one of its own on a CUDA device."""

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

Result = TypeVar("Result")


class Stream(Protocol):
    """Runs launched work in the order of the launches."""

    def launch(self, work: Callable[[], Result]) -> tuple[Result, Callable[[], None]]:
        """Run `work`; return its result, and a function that returns when the device has executed it."""
        ...


class ImmediateStream:
    """A CPU executes work when it is launched; the host alone is late."""

    def launch(self, work: Callable[[], Result]) -> tuple[Result, Callable[[], None]]:
        """See `Stream`."""
        return work(), _nothing


class CudaStream:
    """A stream beside the device's default one; an event is recorded behind each launch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def launch(self, work: Callable[[], Result]) -> tuple[Result, Callable[[], None]]:
        """See `Stream`; work on the default stream, such as a prefill, is waited for first, and waits for this."""
        default = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(default)
        with torch.cuda.stream(self._stream):
            result = work()
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        # Caches that the host gives to another request are written by the default stream: behind this launch.
        default.wait_event(event)
        return result, event.synchronize


def _nothing() -> None:
    """Return: the work is done."""


def stream_on(device: torch.device) -> Stream:
    """The stream for launches on `device`."""
    return CudaStream(device) if device.type == "cuda" else ImmediateStream()
