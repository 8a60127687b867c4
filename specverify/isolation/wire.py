"""Messages over a socket, each with its length in front.

A read never waits for the missing rest of a message. Both ends run code of this project, and messages are built from
its own types (a trace has passed the door), so that multiprocessing's pickling can be used. Bytes that are no message
end the connection (`Garbled`): an engine under test may have written into a descriptor that is not its own.
"""

import socket
import struct
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

HEAD = struct.Struct("!4sQ")
"""The head of a message: MARK, then the length of the body."""

MARK = b"spv1"
"""The first bytes of each message, by which foreign bytes are recognised."""

LARGEST = 2**40
"""Largest length in bytes that a head may state; a larger one is no message of ours."""


class Closed(Exception):
    """The other end closed the connection."""


class Garbled(Exception):
    """The bytes that arrived are no message of ours."""


class Wire:
    """One end of a connection.

    Attributes:
        socket: A connected stream socket.
    """

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._expect(HEAD.size)

    def fileno(self) -> int:
        """The socket's descriptor, for `select`."""
        return self.socket.fileno()

    def send(self, content: Any) -> None:
        """Send one message whole.

        Raises:
            Closed: The other end is closed.
        """
        body = ForkingPickler.dumps(content, 5)
        try:
            self.socket.sendall(HEAD.pack(MARK, len(body)))
            self.socket.sendall(body)
        except OSError as why:
            raise Closed from why

    def receive(self) -> Any:
        """The next message, waiting for it as long as it takes.

        Raises:
            Closed: The other end is closed.
            Garbled: The bytes are no message.
        """
        while True:
            found, content = self.arrived()
            if found:
                return content

    def arrived(self, load: Callable[[bytearray], Any] = ForkingPickler.loads) -> tuple[bool, Any]:
        """Read the available bytes once: (True, message) if a message is complete, else (False, None).

        Raises:
            Closed: The other end is closed.
            Garbled: The bytes are no message.
        """
        try:
            count = self.socket.recv_into(memoryview(self._part)[self._read :])
        except InterruptedError:
            return False, None
        except OSError as why:
            raise Closed from why
        # Zero bytes mean the end of the stream.
        if not count:
            raise Closed
        self._read += count
        if self._read < len(self._part):
            return False, None
        if not self._in_body:
            self._expect(_length(self._part), in_body=True)
            return False, None
        body = self._part
        self._expect(HEAD.size)
        try:
            return True, load(body)
        except Exception as why:  # unpickling foreign bytes may raise anything
            raise Garbled from why

    def _expect(self, size: int, in_body: bool = False) -> None:
        """Prepare to read `size` bytes next: a head, or a body; the system provides their memory page by page."""
        try:
            self._part, self._read, self._in_body = bytearray(size), 0, in_body
        except MemoryError as why:
            raise Garbled from why

    def close(self) -> None:
        """Close this end."""
        self.socket.close()


def _length(head: bytearray) -> int:
    """The length of the body that follows `head`.

    Raises:
        Garbled: The bytes are no head.
    """
    mark, length = HEAD.unpack(head)
    if mark != MARK or not 0 < length <= LARGEST:
        raise Garbled
    return int(length)
