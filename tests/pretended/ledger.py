"""What the pretended device has done: transfers, synchronisations and captures, by line of the engine."""

import sys
import warnings
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The checkout: a line of its product folders is what an entry is charged to."""

ROOMS = tuple(str(ROOT / room) + "/" for room in ("backends", "specverify", "reference", "properties", "tests/meta"))

SYNCS = ("read", "shape", "download", "upload", "synchronize")
"""The kinds of entries that make the host wait for the device.

read: one number of a tensor; shape: a result whose size depends on numbers, as `nonzero` has; download: a copy to the
host; upload: a copy from pageable memory without `non_blocking`; synchronize: a wait that the program asks for.
"""


class Ledger:
    """Entries by kind and line.

    Attributes:
        entries: How often each kind of event was charged to each line, `folder/file.py:line`.
        mode: What `torch.cuda.set_sync_debug_mode` was set to: 0 nothing, 1 a warning, 2 an error at each wait.
    """

    def __init__(self) -> None:
        self.entries: Counter[tuple[str, str]] = Counter()
        self.mode = 0

    def note(self, kind: str) -> None:
        """Charge an event to the line of the engine that runs now; torch's own warning, if that is switched on."""
        self.entries[kind, line_of_the_engine()] += 1
        if kind not in SYNCS or kind == "synchronize" or not self.mode:
            return
        if self.mode == 2:
            raise RuntimeError("called a synchronizing CUDA operation")
        warnings.warn("called a synchronizing CUDA operation", stacklevel=2)

    def clear(self) -> None:
        """Forget all entries."""
        self.entries.clear()
        self.mode = 0

    def count(self, *kinds: str) -> int:
        """How many events of these kinds there were."""
        return sum(number for (kind, _), number in self.entries.items() if kind in kinds)

    def lines(self, *kinds: str) -> dict[str, int]:
        """The lines that events of these kinds were charged to, the most frequent first."""
        lines: Counter[str] = Counter()
        for (kind, line), number in self.entries.items():
            if kind in kinds:
                lines[line] += number
        return dict(lines.most_common())


LEDGER = Ledger()


def line_of_the_engine() -> str:
    """The innermost line of the product, or of a test, that is running; empty outside both."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(ROOMS):
            return f"{name[len(str(ROOT)) + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
