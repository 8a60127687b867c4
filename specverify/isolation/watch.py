"""Watch: an engine's process as the system shows it to the worker after each answer.

It sees the threads, child processes, open files, resident memory and signal handlers that a run left. What changed
once, or grows run by run (`specverify.isolation.growth`), is told; by itself it changes no answer of a later case. All
of it is read from a few files of /proc. On other systems nothing is seen.
"""

import os
import re
from collections.abc import Callable

from specverify.interrupts import signal_name
from specverify.isolation.growth import Growth, Trend
from specverify.isolation.limits import size_words
from specverify.isolation.proc import ProcFile, command_of, name_of, numbers_of
from specverify.reference.case import Case

MEMORY_STEP = 8 * 2**20
"""Bytes by which memory must rise from stretch to stretch to be a trend; a count must rise by 1."""

COUNTED = {"threads": "threads", "open files": "open descriptors", "processes": "child processes"}
"""Quantities that are counted, with their words."""

MASKS = {b"SigBlk": "blocked", b"SigIgn": "ignored", b"SigCgt": "handled"}
"""Lines of the file `status`, with what each says of a signal."""

LINES = re.compile(rb"^(Threads|SigBlk|SigIgn|SigCgt):\s*(\S+)", re.MULTILINE)
"""The lines of the file `status` that are read; it has sixty."""

OF_C = 1 << 31 | 1 << 32
"""The bits of signals 32 and 33, which the C library handles since its first thread."""

OUR_PROGRAMS = (b"multiprocessing.resource_tracker", b"specverify.isolation")
"""Words in the command lines of processes that end by themselves: a helper of Python's, and processes of ours."""


class Watch:
    """One engine's process.

    Args:
        engine: Its process id.
        keeper: The process id of its keeper, which adopts what the engine's children leave; None where unknown.
    """

    def __init__(self, engine: int, keeper: int | None) -> None:
        self._engine = engine
        self._statm = ProcFile(f"/proc/{engine}/statm")
        self._status = ProcFile(f"/proc/{engine}/status")
        parents = [engine] if keeper is None else [engine, keeper]
        self._children = [ProcFile(f"/proc/{pid}/task/{pid}/children") for pid in parents]
        self._trends = {"memory": Trend(MEMORY_STEP), **{kind: Trend(1) for kind in COUNTED}}
        self._family: frozenset[int] = frozenset()
        self._masks: dict[bytes, int] = {}

    def memory_bytes(self) -> int | None:
        """Bytes of memory that the process holds now (resident, with shared pages); None where that is unknown."""
        fields = self._statm.read().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if fields else None

    def begin(self) -> None:
        """Take the process as it is now: its backend is open."""
        self._family = self._living()
        self._masks = _masks(_lines(self._status.read()))

    def look(self, case: Case | None) -> dict[str, tuple[str, Case | None]]:
        """What the last run, of `case`, left: kind to a phrase whose subject is the run, and the first case of it."""
        lines = _lines(self._status.read())
        if not lines:
            return {}
        phrases: dict[str, tuple[str, Case | None]] = {}
        masks = _masks(lines)
        if masks != self._masks:
            phrases["signals"] = (_changed_signals(self._masks, masks), case)
            self._masks = masks
        family = self._living()
        new_programs = sorted(name_of(pid) for pid in family - self._family if self._is_program(pid))
        if new_programs:
            phrases["programs"] = (f"left programs running: {', '.join(new_programs[:4])}", case)
        self._family = family
        values = {
            "memory": self.memory_bytes() or 0,
            "threads": int(lines.get(b"Threads", b"0")),
            "open files": _open_files(self._engine),
            "processes": len(family),
        }
        for kind, value in values.items():
            growth = self._trends[kind].add(value, case)
            if growth is not None:
                phrases[f"{kind}, growing"] = (_growth_phrase(kind, growth), growth.case)
        return phrases

    def _living(self) -> frozenset[int]:
        """The engine's children, and those that its keeper adopted; the keeper's other engines are among these."""
        return frozenset().union(*(numbers_of(file.read()) for file in self._children)) - {self._engine}

    def _is_program(self, pid: int) -> bool:
        """Whether a process runs another program than the engine: the engine itself notes its own forks."""
        command = command_of(pid)
        return command != command_of(self._engine) and not any(word in command for word in OUR_PROGRAMS)

    def close(self) -> None:
        """Close the files."""
        for file in (self._statm, self._status, *self._children):
            file.close()


def _lines(status: bytes) -> dict[bytes, bytes]:
    return dict(LINES.findall(status))


def _masks(lines: dict[bytes, bytes]) -> dict[bytes, int]:
    return {name: int(lines.get(name, b"0"), 16) & ~OF_C for name in MASKS}


def _changed_signals(before: dict[bytes, int], now: dict[bytes, int]) -> str:
    """The signals that are blocked, ignored or handled otherwise than before."""
    parts = []
    for name, word in MASKS.items():
        for verb, bits in ((word, now[name] & ~before[name]), (f"no longer {word}", before[name] & ~now[name])):
            names = [signal_name(bit + 1) for bit in range(64) if bits >> bit & 1]
            if names:
                parts.append(f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} {verb}")
    return f"changed what signals do: {'; '.join(parts)}"


def _open_files(pid: int) -> int:
    """The number of open descriptors of a process."""
    try:
        # Since Linux 6.2 the size of the folder is that number; before, it was 0.
        return os.stat(f"/proc/{pid}/fd").st_size or len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


def _growth_phrase(kind: str, growth: Growth) -> str:
    words: Callable[[int], str] = size_words if kind == "memory" else str
    what = "resident memory" if kind == "memory" else COUNTED[kind]
    stretch = "run by run" if growth.block == 1 else f"from each {growth.block} runs to the next {growth.block}"
    return f"left more {what} behind than the run before, {stretch}: {words(growth.first)}, then {words(growth.last)}"
