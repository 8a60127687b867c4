"""Lifelines: child processes end when their parent ends, for any reason.

On Linux `prctl(2)` has two options for this: a signal that the kernel sends to a child at the death of its parent, and
the adoption of orphans by a process other than `init`. On other systems a child notices that its connection closes.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36

SWEEP_S = 2.0
"""Time limit of `end_children`, in seconds, against processes that fork as fast as they are killed."""


def die_with(parent: int) -> None:
    """Ask the kernel for SIGKILL at the death of process `parent`; exit at once if that process is dead already."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before the call, in which case no signal will come.
    if os.getppid() != parent:
        os._exit(1)


def outlive_parent() -> None:
    """Undo `die_with`, so that this process can end its own children before it ends.

    At the parent's death the kernel continues this process, if it is stopped: a stopped process ends nothing.
    """
    _prctl(PR_SET_PDEATHSIG, signal.SIGCONT)


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends, so that it can kill them all."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def children() -> list[int]:
    """Process ids of the children of this process's main thread, with adopted orphans; empty if unknown."""
    try:
        return [int(word) for word in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except OSError:
        return []


def end_children(spared: Collection[int]) -> None:
    """Kill every child except those in `spared`, and the orphans that become children by that, until none is left.

    It gives up after SWEEP_S seconds, since a process that forks as fast as it is killed would keep it busy for ever.
    """
    until = time.monotonic() + SWEEP_S
    while time.monotonic() < until:
        remaining = [pid for pid in children() if pid not in spared]
        if not remaining:
            return
        for pid in remaining:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in remaining:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


class Bell:
    """A descriptor that becomes readable at the end of a child, so that `select` wakes up."""

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe()
        for end in (self._read_end, self._write_end):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)

    def fileno(self) -> int:
        """The descriptor, for `select`."""
        return self._read_end

    def hush(self) -> None:
        """Take note of the children that have ended: until the next one ends, nothing is readable."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._read_end, 4096)

    def give_up(self) -> None:
        """In a fork: leave the signal to the kernel again, and close the descriptors."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(self._read_end)
        os.close(self._write_end)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        # Python has no function for prctl; the C library of this process is already loaded.
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0)
