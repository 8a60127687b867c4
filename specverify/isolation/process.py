"""An engine's process as seen by its worker: connection, limits and output."""

import contextlib
import os
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from specverify.interrupts import signal_name
from specverify.isolation.ancestor import own_keeper
from specverify.isolation.handle import Handle
from specverify.isolation.keeper import STOPPED_TICKS, TICK_S, KeeperClient, Lost
from specverify.isolation.limits import size_words
from specverify.isolation.proc import STOPPED
from specverify.isolation.watch import Watch
from specverify.isolation.wire import Closed, Garbled, Wire

LAST_LINES = 12
"""Number of output lines of a process that a report keeps."""

LARGEST_PRINT = 32 * 2**20
"""Most bytes of output that are kept, so that an engine that prints without end does not fill the disk."""

KILLED = "left its keeper dead (killed), which ends the process too"
"""How a process ended whose keeper was killed while it ran."""

DUMP_S = 0.5
"""Seconds in which a process may write its stacks before it is killed."""

STACKS = ("Fatal Python error", "Current thread", "Thread 0x")
"""The first words of stacks that faulthandler writes."""

OUR_FOLDER = "/specverify/isolation/"
"""Folder of our own loop in the engine's process; its frames say nothing about the backend."""

LAST_BYTES = 1 << 16
"""The end of the output, in bytes, in which the last lines are looked for."""


@dataclass(frozen=True)
class Limits:
    """The limits of one answer: seconds, and bytes of memory held (None for any amount)."""

    seconds: float
    memory: int | None = None


class EngineProcess:
    """One engine's process.

    Args:
        engine: The backend to open, as `specverify.isolation.engine.serve` reads it.
    """

    def __init__(self, engine: dict[str, Any]) -> None:
        folder = os.getcwd()  # where it is gone, this fails before anything is opened
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process; it has no name
        self._from = 0
        connection, far_end = socket.socketpair()
        environment = {**os.environ, **dict(engine["variables"])}
        order = {**engine, "path": sys.path, "environment": environment, "folder": folder}
        try:
            with far_end:
                self._keeper, self.pid = _start(order, far_end.fileno(), self._printed.fileno())
        except Lost:
            connection.close()
            self._printed.close()
            raise
        keeper = self._keeper.process
        self._process = Handle(self.pid)
        self.watch = Watch(self.pid, None if keeper is None else keeper.pid)
        # Between two ticks a read waits alone; at a tick the limits are checked, and whether the process still lives.
        self._wire = Wire(connection, TICK_S)

    @property
    def ending(self) -> str | None:
        """How the process ended, if it has."""
        self._keeper.listen(0)
        code = self._keeper.exit_code(self.pid)
        return None if code is None else how_ended(code)

    def ask(self, request: tuple[Any, ...], limits: Limits) -> Any:
        """The answer to `request`.

        Raises:
            Lost: The process ended, hung, held too much memory, sent bytes that are no answer, or stopped or killed its
                keeper. By then the process and all that it started are dead.
        """
        try:
            answer = self._await_answer(request, limits)
            self._check_keeper()
            return answer
        except Closed:
            lost = Lost(self._why_closed(), self._last_words())
        except Garbled:
            lost = Lost("wrote what is no answer into the judge's connection", self._last_words())
        except Lost as why:
            lost = why
        self.end()
        raise lost

    def _await_answer(self, request: tuple[Any, ...], limits: Limits) -> Any:
        # Output before the request belongs to earlier cases.
        self._from = self._truncate_output()
        until = time.monotonic() + limits.seconds
        stopped_ticks = 0
        self._wire.send(request)
        while True:
            is_complete, answer = self._wire.read_message()
            self._check_memory(limits)
            if is_complete:
                return answer
            self._truncate_output()
            # A process that the engine started may hold the connection open after the engine's end.
            if self._wire.silent and (how := self.ending) is not None:
                raise Lost(how, self._last_words())
            # Ticks and not seconds: a run that is suspended as a whole stands still too.
            stopped_ticks = stopped_ticks + 1 if self._wire.silent and self._process.state() == STOPPED else 0
            if stopped_ticks > STOPPED_TICKS:
                raise Lost("was stopped by a signal (SIGSTOP) and did not go on", self._last_words())
            if time.monotonic() > until:
                self._dump()
                raise Lost(f"gave no answer within {limits.seconds:.3g} s", self._last_words(), hung=True)

    def _check_memory(self, limits: Limits) -> None:
        if limits.memory is None:
            return
        held_bytes = self.watch.memory_bytes()
        if held_bytes is not None and held_bytes > limits.memory:
            allowed = size_words(limits.memory)
            how = f"held {size_words(held_bytes)} of memory, more than the {allowed} allowed (--memory-limit)"
            raise Lost(how, self._last_words())

    def _check_keeper(self) -> None:
        """See that the last run left the keeper alone.

        Raises:
            Lost: The keeper was stopped, and has been continued; or it was killed.
        """
        if self._keeper.is_stopped():
            self._keeper.awaken()
            raise Lost("left its keeper stopped (SIGSTOP): the keeper was continued", self._last_words())
        if self._keeper.is_dead():
            raise Lost(KILLED, self._last_words())

    def _why_closed(self) -> str:
        """The end of the process in words; the keeper reports it a moment after the connection has closed."""
        if self._keeper.is_dead():
            return KILLED
        if self._keeper.is_stopped():
            self._keeper.awaken()
            return "ended with its keeper stopped (SIGSTOP): the keeper was continued"
        until = time.monotonic() + 1.0
        while time.monotonic() < until and self._keeper.listen(TICK_S):
            if (how := self.ending) is not None:
                return how
        if self._keeper.is_dead():
            return KILLED
        return "closed the judge's connection and went on"

    def _dump(self) -> None:
        """Make the process write its stacks, if it still can."""
        before = os.fstat(self._printed.fileno()).st_size
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
        until = time.monotonic() + DUMP_S
        while time.monotonic() < until and self.ending is None:
            time.sleep(0.02)
            if os.fstat(self._printed.fileno()).st_size > before:
                time.sleep(0.1)  # the rest of it
                return

    def _truncate_output(self) -> int:
        """Delete the output if it has grown too large; return its size."""
        size = os.fstat(self._printed.fileno()).st_size
        if size <= LARGEST_PRINT:
            return size
        os.ftruncate(self._printed.fileno(), 0)
        self._from = 0
        return 0

    def _last_words(self) -> tuple[str, ...]:
        """The last lines of output since the request began."""
        handle = self._printed.fileno()
        size = os.fstat(handle).st_size
        # Of a long output only the end is read.
        begin = max(self._from, size - LAST_BYTES)
        text = os.pread(handle, size - begin, begin).decode(errors="backslashreplace") if size > begin else ""
        return last_words(text)

    def end(self) -> None:
        """Kill the process and all that it started, unless it has ended, and close connection and output file."""
        if self.ending is None:
            self._process.send(signal.SIGKILL)  # the keeper may be stopped, and is again as long as the engine lives
            self._keeper.kill(self.pid)
        self._process.close()
        self.watch.close()
        self._wire.close()
        self._printed.close()


def _start(order: dict[str, Any], connection: int, printed: int) -> tuple[KeeperClient, int]:
    """The keeper of this process, and the process id of the engine that it has started for `order`.

    A keeper that was killed takes orders until its last thread has ended: an order that it did not carry out goes to
    the next keeper.

    Raises:
        Lost: Neither keeper answers.
    """
    keeper = own_keeper()
    try:
        return keeper, keeper.start(order, connection, printed)
    except Lost:
        if keeper.usable:
            raise
    keeper = own_keeper()
    return keeper, keeper.start(order, connection, printed)


def last_words(text: str) -> tuple[str, ...]:
    """The lines of a process's output that tell how it ended: the first frames of a stack, or else the last lines.

    faulthandler writes the innermost frame first, so that a stack is cut at its end, where the frames are our own.
    """
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("Extension modules:")]
    lines = [line for line in lines if OUR_FOLDER not in line]
    stack = next((number for number, line in enumerate(lines) if line.startswith(STACKS)), None)
    if stack is None:
        return tuple(lines[-LAST_LINES:])
    first = max(0, stack - LAST_LINES // 3)
    return tuple(lines[first : first + LAST_LINES])


def how_ended(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exited with code {code}"
    hint = " (the kernel does so where memory runs out)" if code == -signal.SIGKILL else ""
    return f"was ended by {signal_name(-code)}{hint}"
