"""Reading of regular files alone, up to a stated size.

A FIFO would block the reader, and a device may never end.
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

KINDS = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
"""Tests of a file's mode, each with the kind of file that it finds, in words."""


class TooLarge(OSError):
    """A file is longer than its reader allows."""


def irregular(mode: int) -> str | None:
    """The kind of a file with the mode bits `mode`, in words; None for regular files and directories."""
    return next((words for has_kind, words in KINDS if has_kind(mode)), None)


def open_regular(path: str | Path) -> BinaryIO:
    """The regular file `path`, links followed, open for reading; never blocks, whatever `path` is.

    Raises:
        OSError: `strerror` says in plain words why: no such file, no permission, a directory, a FIFO, a socket, a
            device, a name that no file can have.
    """
    try:
        # Checked before opening: opening some devices already has an effect.
        _refuse(os.stat(path).st_mode, path)
        # O_NONBLOCK: opening a FIFO would otherwise wait for a writer. O_BINARY exists on Windows alone.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except ValueError:
        raise OSError(errno.EINVAL, "its name holds a null byte or half a character", str(path)) from None
    try:
        # Checked again after opening: another file may have taken the path meanwhile.
        _refuse(os.fstat(descriptor).st_mode, path)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_whole(path: str | Path, most: int) -> bytes:
    """The content of the regular file `path`, if it is no longer than `most` bytes.

    Raises:
        TooLarge: for a longer file.
        OSError: as `open_regular`.
    """
    with open_regular(path) as file:
        # One byte more than allowed tells a file that is too long.
        content = file.read(most + 1)
    if len(content) > most:
        raise TooLarge(
            errno.EFBIG, f"it is larger than the {most // 2**20} MiB that are read of such a file", str(path)
        )
    return content


def _refuse(mode: int, path: str | Path) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    kind = irregular(mode)
    if kind is not None:
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
