"""Files of /proc that are read again and again.

To read a file that is open takes a quarter of the time of opening it.
"""

import contextlib
import os

SIZE = 4096
"""Bytes that are read at once; none of these files is longer where it matters."""

STOPPED, ZOMBIE = "T", "Z"
"""The letters of a process's state: stopped by a signal; ended, and not waited for."""


class ProcFile:
    """A file of /proc, kept open; the file is that of one process, whatever its id becomes later."""

    def __init__(self, path: str) -> None:
        try:
            self._handle: int | None = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # another system, or the process is gone
            self._handle = None

    @property
    def is_open(self) -> bool:
        """Whether there is such a file."""
        return self._handle is not None

    def read(self) -> bytes:
        """The file's content now; empty where the process is gone, or where there is no such file."""
        if self._handle is not None:
            with contextlib.suppress(OSError):
                return os.pread(self._handle, SIZE, 0)
        return b""

    def close(self) -> None:
        """Close the file."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def state_of(stat: bytes) -> str | None:
    """The letter of a process's state in its file `stat`; None where the process is gone."""
    # The name of the command is in brackets, and may hold brackets and blanks.
    fields = stat.rpartition(b")")[2].split()
    return fields[0].decode() if fields else None


def numbers_of(children: bytes) -> frozenset[int]:
    """The process ids in a file `children`."""
    return frozenset(int(word) for word in children.split())


def command_of(pid: int) -> bytes:
    """The command line of a process, words separated by NUL; empty where it has ended."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


def name_of(pid: int) -> str:
    """The name of a process's program."""
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            return file.read().decode(errors="backslashreplace").strip()
    except OSError:
        return "a program that has ended"
