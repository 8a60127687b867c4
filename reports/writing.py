"""Writing of files, whole or not at all, and of any fact as a JSON value."""

import contextlib
import enum
import errno
import json
import math
import os
import stat
import sys
import uuid
from pathlib import Path
from typing import Any, BinaryIO

from specverify.reference.files.json_types import plain
from specverify.reference.trace import Stage
from specverify.reports.format import clean, show

LARGEST_ARRAY = 4096
"""The largest array, in entries, that JSON holds in full; a larger array is described."""


class Unwritable(OSError):
    """A file that cannot be written.

    Attributes:
        path: The target as it was given.
        why: The reason and what to do, on one line.
    """

    def __init__(self, path: str | Path, reason: str) -> None:
        self.path = str(path)
        self.why = clean(reason)
        super().__init__(f"cannot write {clean(self.path)}: {self.why}")

    @classmethod
    def from_os_error(cls, path: str | Path, error: OSError) -> "Unwritable":
        """The complaint about `path` for a system error, with advice."""
        if isinstance(error, FileNotFoundError):
            advice = "; create the folder first"
        elif isinstance(error, IsADirectoryError):
            advice = "; give the name of a file"
        else:
            advice = "; choose another place"
        return cls(path, f"{error.strerror or error}{advice}")


def write_whole(target: str | Path, content: bytes) -> None:
    """Write a file so that a reader finds the old content or the new content, never a part.

    Standard output (`-`), devices and pipes are written directly.

    Raises:
        Unwritable: when the system refuses; an earlier file stays as it was.
    """
    try:
        if str(target) == "-":
            sys.stdout.write(content.decode())
            sys.stdout.flush()
            return
        # Resolved, so that a symbolic link stays a link and its target is replaced.
        path = Path(target).resolve()
        mode = path.stat().st_mode if path.exists() else None
        if mode is not None and stat.S_ISDIR(mode):
            raise IsADirectoryError(None, "it is a directory")
        if mode is not None and not stat.S_ISREG(mode):
            path.write_bytes(content)
            return
        _replace(path, content)
    except OSError as error:
        raise Unwritable.from_os_error(target, error) from None
    except (ValueError, RuntimeError) as error:
        # A null byte in the name, or a circle of links.
        raise Unwritable(target, f"{error}; choose another name") from None


def check_writable(target: str | Path) -> None:
    """Find out, before the work of a run, whether `write_whole` could write to `target`.

    Raises:
        Unwritable: for a directory, and for a file in a folder that is absent or takes no files.
    """
    if str(target) == "-":
        return
    try:
        path = Path(target).resolve()
        if path.is_dir():
            raise IsADirectoryError(None, "it is a directory")
        if path.exists() and not path.is_file():
            return
        if not path.parent.is_dir():
            (path.parent / "x").stat()  # says why
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise PermissionError(None, "its folder takes no files")
    except OSError as error:
        raise Unwritable.from_os_error(target, error) from None
    except (ValueError, RuntimeError) as error:
        raise Unwritable(target, f"{error}; choose another name") from None


def _replace(path: Path, content: bytes) -> None:
    """Write `content` beside `path`, and rename it to `path`, which the system does in one step."""
    temporary = path.parent / f".{uuid.uuid4().hex}.tmp"
    try:
        if not _link_unnamed(temporary, content):
            with temporary.open("xb") as file:
                _write_through(file, content)
        os.replace(temporary, path)
    # Also on an interrupt: no half-written file stays behind.
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _link_unnamed(path: Path, content: bytes) -> bool:
    """Write `content` into a file without a name, then name it `path`; False where the system has no such files.

    The system removes a file without a name when its writer is killed, which no handler of this process could do.
    """
    if not hasattr(os, "O_TMPFILE"):
        return False
    try:
        handle = os.open(path.parent, os.O_TMPFILE | os.O_WRONLY, 0o666)
    except OSError as error:
        # File systems and kernels without O_TMPFILE answer with one of these.
        if error.errno in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            return False
        raise
    with os.fdopen(handle, "wb") as file:
        _write_through(file, content)
        try:
            # With `src_dir_fd`, which an absolute path ignores, Python follows the link to the file (bpo-37612).
            os.link(f"/proc/self/fd/{handle}", path, src_dir_fd=handle, follow_symlinks=True)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP):  # no /proc, or no links here
                return False
            raise
    return True


def _write_through(file: BinaryIO, content: bytes) -> None:
    """Write `content` and wait until it is on the disk."""
    file.write(content)
    file.flush()
    os.fsync(file.fileno())


def jsonable(value: Any) -> Any:
    """`value` as strict JSON: NumPy as numbers and lists, NaN and infinities as the strings JavaScript gives them.

    >>> jsonable({"a": (1, float("inf"))})
    {'a': [1, 'Infinity']}
    """
    if isinstance(value, Stage):
        return value.word
    if isinstance(value, enum.Enum):
        return jsonable(value.value)
    if hasattr(value, "tolist") and hasattr(value, "shape"):
        return show(value) if getattr(value, "size", 0) > LARGEST_ARRAY else jsonable(value.tolist())
    if isinstance(value, dict):
        return {_text(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return [jsonable(item) for item in sorted(value, key=str)]
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    simple = plain(value)
    if isinstance(simple, float) and not math.isfinite(simple):
        return "NaN" if math.isnan(simple) else "Infinity" if simple > 0 else "-Infinity"
    if isinstance(simple, str):
        return _text(simple)
    if simple is None or isinstance(simple, (bool, int, float)):
        return simple
    return jsonable(simple) if isinstance(simple, (dict, list)) else show(simple)


def _text(value: Any) -> str:
    """A string that UTF-8 can hold: lone surrogates become their escapes."""
    return str(value).encode("utf-8", "backslashreplace").decode()


def as_json(content: Any, indent: int | None = None) -> str:
    """One JSON text, ending in a newline."""
    return json.dumps(jsonable(content), indent=indent, allow_nan=False, ensure_ascii=False) + "\n"


WIDTH = 120
"""The longest line of `flat_json`, in letters; one value that cannot be divided may be longer."""


def flat_json(content: Any) -> str:
    """One JSON text in lines of at most WIDTH letters, ending in a newline.

    A list or an object that fits stands in one line; of another one, as many entries stand in a line as fit.

    >>> print(flat_json({"a": [1, 2], "b": "x" * 110, "c": [{"d": 1}]}).replace("x" * 100, "..."), end="")
    {
     "a": [1, 2],
     "b": "...xxxxxxxxxx",
     "c": [{"d": 1}]
    }
    """
    return _flat(jsonable(content), 0, 0) + "\n"


def _flat(value: Any, depth: int, key_width: int) -> str:
    """`value` behind `depth` spaces and a key of `key_width` letters."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    # A comma may follow.
    if not value or not isinstance(value, (dict, list)) or depth + key_width + len(text) < WIDTH:
        return text
    if isinstance(value, dict):
        begin, end = "{}"
        entries = [(f"{json.dumps(key, ensure_ascii=False)}: ", item) for key, item in value.items()]
    else:
        begin, end = "[]"
        entries = [("", item) for item in value]
    room = WIDTH - depth - 1
    lines: list[str] = []
    is_open = False
    for number, (key, item) in enumerate(entries, 1):
        entry = key + _flat(item, depth + 1, len(key)) + ("," if number < len(entries) else "")
        is_short = "\n" not in entry
        if is_open and is_short and len(lines[-1]) + 1 + len(entry) <= room:
            lines[-1] += f" {entry}"
        else:
            lines.append(entry)
        is_open = is_short
    pad = " " * depth
    return f"{begin}\n" + "".join(f"{pad} {line}\n" for line in lines) + f"{pad}{end}"


def write_json(target: str | Path, content: Any) -> None:
    """Write `content` as JSON to a file, whole or not at all, or to standard output for `-`.

    Raises:
        Unwritable: when the system refuses.
    """
    write_whole(target, as_json(content, indent=1).encode())
