"""Handle: another process, by a descriptor that never means a later process with the same id."""

import contextlib
import os
import signal
import time

from specverify.isolation.proc import STOPPED, ZOMBIE, ProcFile, state_of

SETTLED_S, LOOK_S = 0.5, 0.002
"""Seconds in which a process that was sent a signal acts on it; seconds between two looks."""

SLEEPING = "SI"
"""The letters of a process that waits."""


class Handle:
    """A process that is alive when the handle is made."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._stat = ProcFile(f"/proc/{pid}/stat")
        self._descriptor: int | None = None
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):  # an older kernel, or the process has just ended
                self._descriptor = os.pidfd_open(pid)

    def state(self) -> str | None:
        """The letter of its state; None where it has ended, or where the system does not tell."""
        return state_of(self._stat.read())

    def settled_state(self) -> str | None:
        """The letter of the state of a process that should wait: while it runs, a signal to it may be on its way."""
        until = time.monotonic() + SETTLED_S
        while (state := self.state()) not in (None, STOPPED, ZOMBIE, *SLEEPING) and time.monotonic() < until:
            time.sleep(LOOK_S)
        return state

    def has_ended(self) -> bool:
        """Whether it has ended, as far as the system tells."""
        return self._stat.is_open and self.state() in (None, ZOMBIE)

    def send(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            if self._descriptor is not None:
                signal.pidfd_send_signal(self._descriptor, number)
            else:
                os.kill(self.pid, number)

    def close(self) -> None:
        """Close the descriptors."""
        self._stat.close()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
