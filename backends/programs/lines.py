"""A child process and the lines that it exchanges with us.

Its standard error is passed on, and its last lines are kept for the report of a break.
"""

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Sequence
from threading import Thread
from typing import IO

KEPT_LINES, KEPT_CHARACTERS = 12, 200
"""Lines of standard error that are kept, and the most characters of each."""

LARGEST_LINE = 64 * 2**20
"""Most bytes of an answer."""

CHUNK = 1 << 16
"""Bytes read at once."""

ENDED_S = 2.0
"""Seconds in which a child whose output has ended must have ended too, and its last words have been read."""


class Silent(Exception):
    """The child wrote no whole line in time."""


class Over(Exception):
    """The child wrote no whole line and will write none: its output has ended."""


class Endless(Exception):
    """The child wrote more than LARGEST_LINE bytes without the end of a line."""


class Child:
    """A program that reads lines and writes lines.

    Attributes:
        said: The last lines of its standard error.

    Args:
        words: The program and its arguments.

    Raises:
        OSError: The program cannot be started.
    """

    def __init__(self, words: Sequence[str]) -> None:
        pipe = subprocess.PIPE
        # A session of its own, so that what it starts can be ended with it.
        self._process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        self.last_lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._buffer = b""
        self._listener = Thread(target=_listen, args=(self._process.stderr, self.last_lines), daemon=True)
        self._listener.start()
        # Neither process nor listener refers to this object, so that a forgotten child is ended too.
        self._end = weakref.finalize(self, _end, self._process, self._listener)

    def write(self, line: bytes) -> None:
        """Write one line; raises Over where the child reads no more."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()
        except OSError as why:
            raise Over from why

    def read(self, seconds: float | None = None) -> bytes:
        """The next line, without its end; waits as long as it takes, or for `seconds`.

        Raises:
            Silent, Over, Endless: There is no such line.
        """
        assert self._process.stdout is not None
        out = self._process.stdout.fileno()
        until = None if seconds is None else time.monotonic() + seconds
        while b"\n" not in self._buffer:
            remaining_s = None if until is None else max(0.0, until - time.monotonic())
            if not select.select([out], [], [], remaining_s)[0]:
                raise Silent
            more = os.read(out, CHUNK)
            if not more:
                raise Over
            self._buffer += more
            if len(self._buffer) > LARGEST_LINE:
                raise Endless
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    @property
    def unread(self) -> bytes:
        """Bytes that the child wrote beyond the lines that were read, as far as they have arrived."""
        assert self._process.stdout is not None
        if not self._buffer and select.select([self._process.stdout], [], [], 0)[0]:
            self._buffer += os.read(self._process.stdout.fileno(), CHUNK)
        return self._buffer

    def describe_end(self) -> str:
        """The end of the child in words, after its output has ended; a child that goes on is killed."""
        try:
            code = self._process.wait(ENDED_S)
        except subprocess.TimeoutExpired:
            self.end()
            return "closed its standard output and went on"
        self._listener.join(ENDED_S)
        if code >= 0:
            return f"exited with code {code}"
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
        return f"was ended by signal {-code}"

    def end(self) -> None:
        """Kill the child and all that it started in its session, and wait for its end."""
        self._end()


ERRORS = re.compile(r"\b\w*(error|exception|panic)\w*\b", re.IGNORECASE)
"""A line of standard error that says what went wrong, in most languages."""

TOLD_LINES = 3
"""Most last lines of standard error that a message on one line holds."""


def telling_lines(last_lines: Sequence[str]) -> tuple[str, ...]:
    """The last lines that say what went wrong: those from the last line about an error on, without a stack's frames.

    An interpreter may end with a line of its own, such as its version.

    >>> telling_lines(["boot", "a.mjs:1", "ReferenceError: x is not defined", "    at a.mjs:1:1", "", "Node v20"])
    ('ReferenceError: x is not defined', 'Node v20')
    """
    lines = [line.strip() for line in last_lines if line.strip()]
    error_line = next((number for number in reversed(range(len(lines))) if ERRORS.search(lines[number])), None)
    if error_line is None:
        return tuple(lines[-TOLD_LINES:])
    later_lines = [line for line in lines[error_line + 1 :] if not line.startswith("at ")]
    return tuple([lines[error_line], *later_lines][:TOLD_LINES])


def _listen(stream: IO[bytes], last_lines: deque[str]) -> None:
    """Keep and pass on the lines of a standard error until it ends."""
    with stream:
        for raw in stream:
            line = raw.decode(errors="backslashreplace").rstrip()
            if line:
                last_lines.append(line[:KEPT_CHARACTERS])
                # Where the child hangs, our own process is ended, and what that printed is what the report shows.
                sys.stderr.write(line + "\n")


def _end(process: subprocess.Popen[bytes], listener: Thread) -> None:
    """Kill a child and its session, and close what led to it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        with contextlib.suppress(OSError):  # bytes that the child did not read cannot be flushed
            stream.close()
    listener.join(ENDED_S)
