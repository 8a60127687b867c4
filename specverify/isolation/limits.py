"""Limits: how long one answer may take and how much memory a process may hold before it counts as broken.

The time limit is generous and measured: an engine that answered within a second on the median is not waited for for
ten minutes, and an engine that compiles for a minute is not called a hang.
"""

import contextlib
import os
import statistics
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

BUILT_IN_S, CHECKPOINT_S = 120.0, 1800.0
"""Seconds that every answer may take at least, on drawn models and on a checkpoint that must be loaded first."""

MEDIANS = 200.0
"""An answer may take this many times the median of the backend's own answers, where that is more."""

AFTER_A_HANG_S, AFTER_A_HANG = 5.0, 30.0
"""After an answer that never came: seconds at least, and times the slowest answer so far. A hang is made smaller by
asking for its like again and again, each time up to the limit."""

REMEMBERED = 500
"""Answers whose times the median is taken of."""

SHARE_OF_MEMORY = 0.8
"""Share of the machine's memory (or of the container's) that one engine may hold unless told otherwise."""

CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Where Linux tells the memory of a container, in its newer and its older form."""

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass
class Patience:
    """How long to wait for an answer.

    Attributes:
        asked: Seconds that the user gave (`--case-timeout`), or None to measure.
        floor: Seconds that every answer may take where nothing was given.
    """

    asked: float | None = None
    floor: float = BUILT_IN_S
    _took: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _slowest: float = 0.0
    _hung: bool = False

    def answered(self, seconds: float) -> None:
        """Note an answer that came."""
        self._took.append(seconds)
        self._slowest = max(self._slowest, seconds)

    def hung(self) -> None:
        """Note an answer that did not come."""
        self._hung = True

    @property
    def seconds(self) -> float:
        """The limit for the next answer."""
        limit = self.asked
        if limit is None:
            limit = max(self.floor, MEDIANS * statistics.median(self._took) if self._took else 0.0)
        if self._hung and self._took:
            limit = min(limit, max(AFTER_A_HANG_S, AFTER_A_HANG * self._slowest))
        return limit


def held_by(pid: int) -> int | None:
    """Bytes of memory that a process holds now (resident, shared pages included), or None where nobody tells."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def processor_s(pid: int) -> float:
    """Seconds of processor time that a process has used so far; 0 where nobody tells."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def default_memory() -> int | None:
    """SHARE_OF_MEMORY of what the machine, or the container, has; None where that is unknown."""
    known = [size for size in map(_limit_in, CGROUP_LIMITS) if size is not None]
    with contextlib.suppress(OSError, ValueError):
        known.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return int(SHARE_OF_MEMORY * min(known)) if known else None


def _limit_in(file: str) -> int | None:
    """The number that a file of the kernel holds; None where there is no such file, or where it says "max"."""
    try:
        return int(Path(file).read_text())
    except (OSError, ValueError):
        return None


def size_of(text: str) -> int:
    """Bytes that a size such as `8G`, `512MiB` or `2000000` means.

    Raises:
        ValueError: with one line, for anything else.

    >>> size_of("8G"), size_of("1.5 KiB")
    (8589934592, 1536)
    """
    word = text.strip().upper().removesuffix("B").removesuffix("I")
    number, unit = (word[:-1], word[-1]) if word[-1:] in UNITS and word[-1:] else (word, "")
    try:
        size = int(float(number) * UNITS[unit])
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is no size: write 8G, 512M or a number of bytes") from None
    if size <= 0:
        raise ValueError(f"{text!r} is no size: it must be above 0")
    return size


def told(size: int) -> str:
    """A size in words: `8 GiB`."""
    for unit in ("T", "G", "M", "K"):
        if size >= UNITS[unit]:
            return f"{size / UNITS[unit]:.3g} {unit}iB"
    return f"{size} bytes"
