"""Messages over a socket, each with its length in front.

A read never waits for the missing rest of a message. Both ends run code of this project, and messages are built from
its own types (a trace has passed the door), so that multiprocessing's pickling can be used. Bytes that are no message
end the connection (`Garbled`): an engine under test may have written into a descriptor that is not its own.
"""

import copyreg
import io
import socket
import struct
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import numpy.typing as npt

HEAD = struct.Struct("!4sQ")
"""The head of a message: MARK, then the length of the body."""

MARK = b"spv1"
"""The first bytes of each message, by which foreign bytes are recognised."""

LARGEST = 2**40
"""Largest length in bytes that a head may state; a larger one is no message of ours."""

AT_ONCE = 2**18
"""Bytes of the buffer that a wire reads into; more than a Unix socket holds by default (208 KiB)."""

LARGEST_KEPT = 2**25
"""Most bytes of a buffer that is kept for the next message."""

PLAIN = "?bBhHiIlLqQefd"
"""The letters of dtypes whose arrays are told by their bytes: booleans, whole numbers and fractions."""

SMALL = 2**13
"""Most bytes of an array that is sent as plain bytes."""


class Closed(Exception):
    """The other end closed the connection."""


class Garbled(Exception):
    """The bytes that arrived are no message of ours."""


def reduce_array(array: npt.NDArray[Any]) -> Any:
    """An array for the pickler: its bytes, where it is small and they tell all of it, and else in NumPy's own form.

    A trace holds some sixty small arrays, each of which NumPy's form makes three times as slow. A large one is copied
    once more than by NumPy.
    """
    # The letter of a dtype does not say the order of its bytes.
    if array.nbytes > SMALL or array.dtype.char not in PLAIN or not array.dtype.isnative:
        return array.__reduce_ex__(5)
    content = array.tobytes()
    # An array that is made of a bytearray can be written to, one that is made of bytes cannot.
    return np.ndarray, (array.shape, array.dtype.char, bytearray(content) if array.flags.writeable else content)


class Message(ForkingPickler):
    """The pickler of messages.

    ForkingPickler looks every object's type up in a `ChainMap`, in Python, for reductions of torch's tensors and of
    descriptors. No message holds those, and the lookups took half of the time of a trace.
    """

    def __init__(self, *arguments: Any) -> None:
        # Past ForkingPickler's own method, which makes its table anew for each message.
        super(ForkingPickler, self).__init__(*arguments)
        self.dispatch_table = REDUCTIONS


REDUCTIONS: dict[type, Callable[[Any], Any]] = {**copyreg.dispatch_table, np.ndarray: reduce_array}
"""How objects of some types are pickled; all others have their types' own form."""


class Wire:
    """One end of a connection.

    Attributes:
        socket: A connected stream socket.
        silent: Whether the last read ended with a tick, without a byte.

    Args:
        end: The socket.
        tick: Seconds after which a read gives up if nothing arrives; 0 to wait as long as it takes.
    """

    def __init__(self, end: socket.socket, tick: float = 0.0) -> None:
        self.socket = end
        self.silent = False
        if tick:
            # The kernel's own time limit of a read: `select` before each read would cost a second call and wake-up.
            seconds = int(tick)
            limit = struct.pack("ll", seconds, int((tick - seconds) * 1e6))
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        # Both buffers are used again for the next message: the first touch of a page of memory costs more than a copy.
        self._written = io.BytesIO()
        self._buffer = bytearray(AT_ONCE)
        self._filled = 0

    def send(self, content: Any) -> None:
        """Send one message whole.

        Raises:
            Closed: The other end is closed.
        """
        self._written.seek(0)
        self._written.write(bytes(HEAD.size))
        Message(self._written, 5).dump(content)
        size = self._written.tell()
        with self._written.getbuffer() as written:
            HEAD.pack_into(written, 0, MARK, size - HEAD.size)
            try:
                # Head and body together: each send wakes the other end.
                self.socket.sendall(written[:size])
            except OSError as why:
                raise Closed from why
        if size > LARGEST_KEPT:
            self._written = io.BytesIO()

    def receive(self) -> Any:
        """The next message, waiting for it as long as it takes.

        Raises:
            Closed: The other end is closed.
            Garbled: The bytes are no message.
        """
        while True:
            is_complete, content = self.read_message()
            if is_complete:
                return content

    def read_message(self, load: Callable[[memoryview], Any] = ForkingPickler.loads) -> tuple[bool, Any]:
        """Read once: (True, message) if a message is now complete, else (False, None), as after a tick without bytes.

        Raises:
            Closed: The other end is closed.
            Garbled: The bytes are no message.
        """
        try:
            count = self.socket.recv_into(memoryview(self._buffer)[self._filled :])
            self.silent = False
        except BlockingIOError:
            self.silent = True
            return False, None
        except OSError as why:
            raise Closed from why
        # Zero bytes mean the end of the stream.
        if not count:
            raise Closed
        self._filled += count
        if self._filled < HEAD.size:
            return False, None
        end = HEAD.size + _length(self._buffer)
        if end > len(self._buffer):
            self._buffer = self._longer(end)
        if self._filled < end:
            return False, None
        try:
            return True, load(memoryview(self._buffer)[HEAD.size : end])
        except Exception as why:  # unpickling foreign bytes may raise anything
            raise Garbled from why
        finally:
            self._drop(end)

    def _longer(self, size: int) -> bytearray:
        """A buffer of `size` bytes that begins with the bytes read so far; the system provides it page by page."""
        try:
            buffer = bytearray(size)
        except MemoryError as why:
            raise Garbled from why
        buffer[: self._filled] = memoryview(self._buffer)[: self._filled]
        return buffer

    def _drop(self, end: int) -> None:
        """Forget the first `end` bytes.

        Bytes behind them are foreign, since each side waits for the other's message. They are kept, and the next read
        finds that they are no head.
        """
        surplus = self._buffer[end : self._filled]
        if len(self._buffer) > LARGEST_KEPT:
            self._buffer = bytearray(AT_ONCE)
        self._filled = min(len(surplus), HEAD.size)
        self._buffer[: self._filled] = surplus[: self._filled]

    def close(self) -> None:
        """Close this end."""
        self.socket.close()


def _length(head: bytearray) -> int:
    """The length of the body that follows the head at the beginning of `head`.

    Raises:
        Garbled: The bytes are no head.
    """
    mark, length = HEAD.unpack_from(head)
    if mark != MARK or not 0 < length <= LARGEST:
        raise Garbled
    return int(length)
