"""The memory that the processes of this run have already, which is free to nobody but the run."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from specverify.isolation.proc import command_of, numbers_of

PROC = Path("/proc")

OURS = (b"specverify", b"multiprocessing")
"""Words in the command lines of a run's processes: the command itself, and what it spawns."""


def run_bytes() -> int:
    """The bytes that this run's processes have beside the pages of files; 0 where no system tells."""
    return sum(_anonymous_bytes(pid) for pid in _with_descendants(_first_of_run()))


def _first_of_run() -> int:
    """The process of the run's command: the highest of this process's parents whose command line names us."""
    first, parent = os.getpid(), os.getppid()
    while parent > 1 and any(word in command_of(parent) for word in OURS):
        first, parent = parent, _parent_of(parent)
    return first


def _parent_of(pid: int) -> int:
    return int(_fields_of(pid, "status").get("PPid", "0"))


def _with_descendants(pid: int) -> Iterator[int]:
    yield pid
    with suppress(OSError):
        for child in numbers_of((PROC / str(pid) / "task" / str(pid) / "children").read_bytes()):
            yield from _with_descendants(child)


def _anonymous_bytes(pid: int) -> int:
    """A process's part of pages that no file backs: one that forked processes share counts once for all of them."""
    return 1024 * int(_fields_of(pid, "smaps_rollup").get("Pss_Anon", "0 kB").split()[0])


def _fields_of(pid: int, file: str) -> dict[str, str]:
    """The fields of a process's file `status` or `smaps_rollup`; none where it has ended, or is another user's."""
    with suppress(OSError):
        lines = (PROC / str(pid) / file).read_text(errors="replace").splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return {}
