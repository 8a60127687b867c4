"""Lifelines: child processes end when their parent ends, whatever ended it.

Linux offers two calls for it, both `prctl(2)`: a signal that the kernel sends to a child at the death of its parent,
and the adoption of orphans by a process that is no `init`. Elsewhere a child finds out when its connection closes.
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
"""Seconds that `end_children` goes on killing: a process that forks as fast as it is killed would never end it."""


def die_with(parent: int) -> None:
    """Ask the kernel for SIGKILL at the death of process `parent`; exit at once if that process is dead already."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def outlive_parent() -> None:
    """Take back `die_with`: the process ends by itself, after it has ended its own children."""
    _prctl(PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends, so that none is lost from sight."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def children() -> list[int]:
    """Process ids of the children of this process's main thread, adopted orphans included; empty where unknown."""
    try:
        return [int(word) for word in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except OSError:
        return []


def end_children(but: Collection[int]) -> None:
    """Kill every child except those in `but`, then whoever becomes a child by that, until none is left.

    After SWEEP_S seconds the rest is left alone: a process that forks as fast as it is killed would never end it.
    """
    until = time.monotonic() + SWEEP_S
    while (left := [pid for pid in children() if pid not in but]) and time.monotonic() < until:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0)
