"""The progress of a run as calls of a function of the user's."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from specverify.reports.format import cut


@dataclass(frozen=True)
class Progressed:
    """How far a run is.

    Attributes:
        judged: Cases that were judged, or declined.
        wanted: Cases of the run; None where time alone ends it.
        failures: Cases that differ.
        seconds: Wall time since the run began.
        activity: What the run does beside judging, such as shrinking; else empty.
        line: A line about the run, such as how long it will take; else empty.
    """

    judged: int
    wanted: int | None
    failures: int
    seconds: float
    activity: str = ""
    line: str = ""


Progress = Callable[[Progressed], None]
"""A function that is called whenever a case was judged, and when the run begins to do something else."""


class Calls:
    """Calls of the user's function, in the place of `specverify.reports.progress.Progress`."""

    def __init__(self, total: int | None, call: Progress) -> None:
        self.num_wanted = total
        self._call = call
        self._judged = self._failures = 0
        self._activity = ""
        self._began = time.monotonic()

    def __enter__(self) -> "Calls":
        self._began = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def advance(self, n: int = 1, failures: int = 0) -> None:
        """Count `n` more judged cases, `failures` of them failing."""
        self._judged += n
        self._failures += failures
        self._tell()

    def note(self, text: str) -> None:
        """The run does something else now."""
        self._activity = cut(text, 60)
        self._tell()

    def say(self, text: str) -> None:
        """A line about the run."""
        self._tell(text)

    def show_power(self, text: str) -> None:
        """What the run could see by now: results tell it."""

    def restart(self) -> None:
        """The cases so far were judged before."""

    def wait(self) -> None:
        """Nothing happened for a moment."""

    def _tell(self, line: str = "") -> None:
        seconds = time.monotonic() - self._began
        self._call(Progressed(self._judged, self.num_wanted, self._failures, seconds, self._activity, line))


class Silent(Calls):
    """No progress is told."""

    def __init__(self, total: int | None) -> None:
        super().__init__(total, lambda progressed: None)
