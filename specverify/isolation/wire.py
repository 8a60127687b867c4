"""Wire: whole messages over a socket, each with its length in front, read without ever waiting for a missing rest.

Both ends run code of this project, and what crosses is built from its own types (a trace has passed the door), so
multiprocessing's pickling carries it. Bytes that are no message end the connection (`Garbled`): an engine under test
may have written into a descriptor that is not its own.
"""

import socket
import struct
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

HEAD = struct.Struct("!4sQ")
MARK = b"spv1"

LARGEST = 2**40
"""Bytes that a message may claim to have; more than that is no message of ours."""


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
        """For select."""
        return self.socket.fileno()

    def send(self, content: Any) -> None:
        """Send one message whole.

        Raises:
            Closed: when nobody reads any more.
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
            Closed, Garbled: when there is none.
        """
        while True:
            found, content = self.arrived()
            if found:
                return content

    def arrived(self, load: Callable[[bytearray], Any] = ForkingPickler.loads) -> tuple[bool, Any]:
        """Read once what is there: (True, the message) when one is whole, else (False, None).

        Raises:
            Closed: when the other end is closed.
            Garbled: when the bytes are no message.
        """
        try:
            count = self.socket.recv_into(memoryview(self._part)[self._read :])
        except InterruptedError:
            return False, None
        except OSError as why:
            raise Closed from why
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
        except Exception as why:  # unpickling raises whatever the bytes lead it to
            raise Garbled from why

    def _expect(self, size: int, in_body: bool = False) -> None:
        """Read a head, or a body of `size` bytes, next. Its memory is taken as it fills, a page at a time."""
        try:
            self._part, self._read, self._in_body = bytearray(size), 0, in_body
        except MemoryError as why:
            raise Garbled from why

    def close(self) -> None:
        """Close this end."""
        self.socket.close()


def _length(head: bytearray) -> int:
    """The bytes of the body that follows `head`; raises Garbled where it is no head."""
    mark, length = HEAD.unpack(head)
    if mark != MARK or not 0 < length <= LARGEST:
        raise Garbled
    return int(length)
