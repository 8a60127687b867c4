"""A mailbox in shared memory.

Each letter is a mapped file, in a folder that lies in memory where the system has one. A letter is renamed when it is
whole, so that a sender that dies leaves no part of one to be read.
"""

import mmap
import os
import time
from collections.abc import Callable
from multiprocessing.synchronize import Semaphore
from pathlib import Path

from specverify.backends.engine.handover.mailbox import PeerLost

MEMORY = Path("/dev/shm")
"""The folder of Linux whose files are memory."""

LOOK = 0.2
"""Seconds after which a side that waits looks whether the other one is alive."""


class SharedMemoryMailbox:
    """The end of one side, in the folder of both sides.

    `own_letters` counts the letters that wait for this side, `peer_letters` those for the other; `is_gone` says whether
    the other side is dead.
    """

    def __init__(
        self,
        folder: Path,
        side: str,
        other_side: str,
        own_letters: Semaphore,
        peer_letters: Semaphore,
        is_gone: Callable[[], bool],
    ) -> None:
        self._folder = folder
        self._side = side
        self._other_side = other_side
        self._own_letters = own_letters
        self._peer_letters = peer_letters
        self._is_peer_gone = is_gone
        self._num_posted = self._num_taken = 0

    def post(self, letter: bytes) -> None:
        """See `Mailbox.post`."""
        if self._is_peer_gone():
            raise PeerLost(f"the {self._other_side} side is gone")
        file_name = self._folder / f"{self._other_side}-{self._num_posted}"
        part = file_name.with_suffix(".part")
        with open(part, "w+b") as file:
            file.truncate(len(letter))
            with mmap.mmap(file.fileno(), len(letter)) as memory:
                memory[:] = letter
        os.rename(part, file_name)
        self._num_posted += 1
        self._peer_letters.release()

    def take(self, seconds: float) -> bytes:
        """See `Mailbox.take`."""
        until = time.monotonic() + seconds
        while not self._own_letters.acquire(timeout=min(LOOK, max(until - time.monotonic(), 0.001))):
            if self._is_peer_gone():
                raise PeerLost(f"the {self._other_side} side is gone")
            if time.monotonic() > until:
                raise PeerLost(f"no letter came from the {self._other_side} side within {seconds:.3g} seconds")
        place = self._folder / f"{self._side}-{self._num_taken}"
        self._num_taken += 1
        with open(place, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
            letter = bytes(memory)
        os.unlink(place)
        return letter
