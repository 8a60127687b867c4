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

CHUNK = 1 << 20


class Closed(Exception):
    """The other end closed the connection."""


class Garbled(Exception):
    """What arrived is no message of ours."""


def packed(content: Any) -> memoryview:
    """The bytes of one message, its head included."""
    body = bytes(ForkingPickler.dumps(content, 5))
    return memoryview(HEAD.pack(MARK, len(body)) + body)


class Wire:
    """One end of a connection.

    Attributes:
        socket: A connected stream socket.
    """

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._held = bytearray()

    def fileno(self) -> int:
        """For select."""
        return self.socket.fileno()

    def send(self, content: Any) -> None:
        """Send one message whole.

        Raises:
            Closed: when nobody reads any more.
        """
        try:
            self.socket.sendall(packed(content))
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

    def arrived(self, load: Callable[[bytes], Any] = ForkingPickler.loads) -> tuple[bool, Any]:
        """Read once what is there: (True, the message) when one is whole, else (False, None).

        Raises:
            Closed: when the other end is closed.
            Garbled: when the bytes are no message.
        """
        whole = self._message(load)
        if whole[0]:
            return whole
        try:
            chunk = self.socket.recv(CHUNK)
        except InterruptedError:
            return False, None
        except OSError as why:
            raise Closed from why
        if not chunk:
            raise Closed
        self._held += chunk
        return self._message(load)

    def _message(self, load: Callable[[bytes], Any]) -> tuple[bool, Any]:
        if len(self._held) < HEAD.size:
            return False, None
        mark, length = HEAD.unpack_from(self._held)
        if mark != MARK or length > LARGEST:
            raise Garbled
        if len(self._held) < HEAD.size + length:
            return False, None
        body = bytes(memoryview(self._held)[HEAD.size : HEAD.size + length])
        del self._held[: HEAD.size + length]
        try:
            return True, load(body)
        except Exception as why:  # unpickling raises whatever the bytes lead it to
            raise Garbled from why

    def close(self) -> None:
        """Close this end."""
        self.socket.close()
