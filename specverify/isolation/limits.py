"""Limits of a backend's process: the time of one answer, and its memory.

The time limit follows the engine's own answers and is generous. An engine whose median answer takes a second is ended
before ten minutes have passed, and an engine that compiles for a minute does not count as hung.
"""

import contextlib
import os
import statistics
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

BUILT_IN_S, CHECKPOINT_S = 120.0, 1800.0
"""Least time limit of an answer in seconds: on drawn models, and on a checkpoint that must be loaded first."""

START_S = 1800.0
"""Time limit for opening a backend, and the engine of a case, in seconds."""

MEDIANS = 200.0
"""An answer may take this many times the median time of the backend's answers, if that is longer."""

AFTER_A_HANG_S, AFTER_A_HANG = 5.0, 30.0
"""The limit after a hang: at least so many seconds, and so many times the slowest answer so far.

Shrinking a hang repeats similar cases, and each that hangs takes as long as the limit.
"""

REMEMBERED = 500
"""Number of the latest answers of which the median is taken."""

EACH = 32
"""Answers between two computations of the median, once there are as many."""

SHARE_OF_MEMORY = 0.8
"""Share of the machine's (or container's) memory that one engine may hold by default."""

CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""The files with a container's memory limit: control groups version 2, then version 1."""

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass
class Patience:
    """The time limit of an answer.

    Attributes:
        user_limit_s: The user's limit in seconds (`--case-timeout`), or None for a measured one.
        floor: Least measured limit in seconds.
        start_s: The limit for opening an engine, in seconds (`--start-timeout`).
    """

    user_limit_s: float | None = None
    floor: float = BUILT_IN_S
    start_s: float = START_S
    _times_s: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _median: float = 0.0
    _answers: int = 0
    _slowest: float = 0.0
    _hung: bool = False

    def note_answer(self, seconds: float) -> None:
        """Note the time of an answer."""
        self._times_s.append(seconds)
        # The median of hundreds of answers changes slowly, and sorting them at each answer would cost more than asking.
        if self._answers < EACH or self._answers % EACH == 0:
            self._median = statistics.median(self._times_s)
        self._answers += 1
        self._slowest = max(self._slowest, seconds)

    def note_hang(self) -> None:
        """Note that an answer did not come in time."""
        self._hung = True

    @property
    def seconds(self) -> float:
        """The limit for the next answer."""
        limit = self.user_limit_s
        if limit is None:
            limit = max(self.floor, MEDIANS * self._median)
        # Without any answer so far there is no time to compare with.
        if self._hung and self._times_s:
            limit = min(limit, max(AFTER_A_HANG_S, AFTER_A_HANG * self._slowest))
        return limit


def processor_s(pid: int) -> float:
    """Seconds of processor time that a process has used so far; 0 if the system does not tell."""
    # After the command name, which is in brackets and may hold blanks, fields 11 and 12 are user and system time.
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def default_memory() -> int | None:
    """SHARE_OF_MEMORY of the memory of the machine or of the container, whichever is less; None if unknown."""
    sizes = [size for size in map(_limit_in, CGROUP_LIMITS) if size is not None]
    with contextlib.suppress(OSError, ValueError):
        sizes.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return int(SHARE_OF_MEMORY * min(sizes)) if sizes else None


def _limit_in(file: str) -> int | None:
    """The number in a file of the kernel; None if there is no such file, or if it holds the word `max`."""
    try:
        return int(Path(file).read_text())
    except (OSError, ValueError):
        return None


def size_of(text: str) -> int:
    """The number of bytes of a size such as `8G`, `512MiB` or `2000000`.

    Raises:
        ValueError: The text is no such size; the message is one line.

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


def size_words(size: int) -> str:
    """A size in words: `8 GiB`."""
    for unit in ("T", "G", "M", "K"):
        if size >= UNITS[unit]:
            return f"{size / UNITS[unit]:.3g} {unit}iB"
    return f"{size} bytes"
