"""Streams and events of the pretended device, with a clock that says which work has happened before which.

Work of one stream runs in the order of its launches. Work of two streams is ordered by waits alone, and the host knows
of work only behind a synchronisation. So each stream, each event and the host carries a clock: for every stream, the
number of its launches that have certainly ended.
"""

from __future__ import annotations

import threading
import time
from typing import Any

Clock = dict[int, int]
"""For the number of a stream, how many of its launches have ended."""


def advance(clock: Clock, other_clock: Clock) -> None:
    """Let `clock` know what `other_clock` knows."""
    for number, ticks in other_clock.items():
        if ticks > clock.get(number, 0):
            clock[number] = ticks


class Host:
    """The clock of the host, and the streams that it has made.

    Attributes:
        clock: The launches of which the host knows that they have ended.
        streams: Every stream.
    """

    def __init__(self) -> None:
        self.clock: Clock = {}
        self.streams: list[Stream] = []

    def synchronize(self) -> None:
        """Wait for all work of all streams."""
        for stream in self.streams:
            stream.synchronize()


HOST = Host()


class Stream:
    """A queue of work, in the place of `torch.cuda.Stream`.

    Attributes:
        number: Its number; 0 is the default stream.
        launches: How many pieces of work were launched on it.
        clock: The launches of other streams that end before its next piece of work begins.
    """

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.number = len(HOST.streams)
        self.launches = 0
        self.clock: Clock = {}
        HOST.streams.append(self)

    def launch(self) -> int:
        """Launch a piece of work; returns its number on this stream. What the host waited for has ended before it."""
        advance(self.clock, HOST.clock)
        self.launches += 1
        return self.launches

    def knows(self, number: int, tick: int) -> bool:
        """Whether the launch `tick` of stream `number` ends before the next work of this stream begins."""
        return number == self.number or self.clock.get(number, 0) >= tick or HOST.clock.get(number, 0) >= tick

    @property
    def now(self) -> Clock:
        """The clock of a moment behind all work launched so far."""
        return {**self.clock, self.number: self.launches}

    def wait_stream(self, stream: Stream) -> None:
        """Let later work begin behind all work that `stream` has now."""
        advance(self.clock, stream.now)

    def wait_event(self, event: Event) -> None:
        """Let later work begin behind the event."""
        advance(self.clock, event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        """An event behind all work launched so far."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Let the host wait for all work launched so far."""
        advance(HOST.clock, self.now)

    def query(self) -> bool:
        """Whether the host knows that all work has ended."""
        return HOST.clock.get(self.number, 0) >= self.launches


class Event:
    """A place in a stream, in the place of `torch.cuda.Event`."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.clock: Clock = {}
        self._recorded_s = 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Take the place behind all work that `stream`, by default the current one, has now."""
        self.clock = (stream or current_stream()).now
        self._recorded_s = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """Let later work of `stream` begin behind this event."""
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        """Let the host wait for the event."""
        advance(HOST.clock, self.clock)

    def query(self) -> bool:
        """Whether the host knows that the event has happened."""
        return all(HOST.clock.get(number, 0) >= tick for number, tick in self.clock.items())

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to `end`: here, the host's own."""
        return 1000 * (end._recorded_s - self._recorded_s)


class _Current(threading.local):
    """The current stream of each thread."""

    def __init__(self) -> None:
        self.stream = DEFAULT


DEFAULT = Stream()
_CURRENT = _Current()


def current_stream(device: Any = None) -> Stream:
    """In the place of `torch.cuda.current_stream`."""
    return _CURRENT.stream


def set_stream(stream: Stream) -> None:
    """In the place of `torch.cuda.set_stream`."""
    _CURRENT.stream = stream


class StreamContext:
    """In the place of `torch.cuda.stream`: the stream is current from `__enter__` until `__exit__` is called."""

    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream
        self._before = _CURRENT.stream

    def __enter__(self) -> None:
        self._before = _CURRENT.stream
        if self._stream is not None:
            _CURRENT.stream = self._stream

    def __exit__(self, *_: object) -> None:
        _CURRENT.stream = self._before
