"""The progress of a run on standard error: a bar, or occasional plain lines.

A terminal gets the bar; a file, a pipe and CI get the lines.
"""

import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from specverify.reports.format import cut, number, plural
from specverify.reports.pages.screen import in_ci

FEWEST = 3
"""The cases after the first ones that a speed and a time left are measured on."""

STARTING = "starting up"
"""The words for the time before the first case."""

EVERY_S = 30.0
"""The seconds between two lines where there is no terminal."""


class AnyProgress(Protocol):
    """What is told of a run while it goes on; `Progress` shows it, the Python interface calls a function with it.

    Attributes:
        num_wanted: The cases of the run; None where time alone ends it.
    """

    num_wanted: int | None

    def advance(self, n: int = 1, failures: int = 0) -> None:
        """Count `n` more judged cases, `failures` of them failing."""

    def note(self, text: str) -> None:
        """The run does something else now."""

    def show_power(self, text: str) -> None:
        """What the run could see by now."""

    def restart(self) -> None:
        """The cases so far were judged before."""

    def wait(self) -> None:
        """Nothing happened for a moment."""

    def say(self, text: str) -> None:
        """A line that stays."""

    def __enter__(self) -> Any:
        """Begin."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End."""


class Progress:
    """Judged cases out of those wanted, cases per second, time left, and failures so far.

    The time left comes from the speed that was measured since the first cases; what came before them is start-up, and
    is told as such.

    A terminal shows one bar, which vanishes at the end. Elsewhere, and under CI, one plain line appears at most every
    `every_s` seconds, so that a short run prints nothing. Standard output is never touched. Without `total` only time
    ends the run. The `clock` counts seconds and never goes back.
    """

    def __init__(
        self,
        total: int | None,
        file: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        every_s: float = EVERY_S,
    ) -> None:
        self.num_wanted = total
        self.num_done = 0
        self.failures = 0
        # Time and count where the first cases were done: what came before is start-up, which the others do not repeat.
        self._first_cases: tuple[float, int] | None = None
        self._file = sys.stderr if file is None else file
        self._clock = clock
        self._every_s = every_s
        self._activity = self._power_words = ""
        self._last_line_time = self._start_time = clock()
        self._bar = self._make_bar() if shows_bars(self._file) else None
        self._task = (
            self._bar.add_task("cases", total=total, pace="", left=STARTING, failures="", note="")
            if self._bar
            else None
        )

    def _make_bar(self) -> Bar:
        return Bar(
            # markup=False: brackets in a note are text, and not markup of rich.
            TextColumn("cases", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[pace]}", markup=False),
            TextColumn("{task.fields[left]}", markup=False),
            TextColumn("{task.fields[failures]}", markup=False),
            TextColumn("{task.fields[note]}", markup=False),
            # `shows_bars` has already decided that this is a terminal.
            console=Console(file=self._file, force_terminal=True, highlight=False),
            transient=True,
            # Rich would otherwise take standard output into its own hands.
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def __enter__(self) -> "Progress":
        self._last_line_time = self._start_time = self._clock()
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, n: int = 1, failures: int = 0) -> None:
        """Count `n` more judged cases, `failures` of them failing."""
        self.num_done += n
        self.failures += failures
        if self._first_cases is None:
            self._first_cases = (self._clock(), self.num_done)
        self._show()

    def note(self, text: str) -> None:
        """Show what the run does now, such as shrinking, beside the counts until the next note."""
        self._activity = cut(text, 60)
        self._show()

    def show_power(self, text: str) -> None:
        """Show what the run could see by now, in place of what it could see before."""
        self._power_words = cut(text, 60)

    def restart(self) -> None:
        """Measure the speed from the next cases on: the ones so far were done before."""
        self._first_cases, self._start_time = None, self._clock()

    def wait(self) -> None:
        """Nothing happened for a moment: off a terminal, a line is due all the same now and then."""
        if not self._bar:
            self._show()

    def say(self, text: str) -> None:
        """Write one line that stays."""
        if self._bar:
            self._bar.console.print(text, markup=False, soft_wrap=True)
        else:
            self._file.write(text + "\n")
            self._file.flush()

    def line(self) -> str:
        """The state of the run on one line."""
        total = f" of {self.num_wanted}" if self.num_wanted is not None else ""
        parts = [
            f"{self.num_done}{total} cases",
            self._pace(),
            self._time_left(),
            self._failure_words(),
            self._power_words,
            self._activity,
        ]
        return ", ".join(part for part in parts if part)

    def _rate(self) -> float | None:
        """Cases per second since the first ones were done; None where too few were done since."""
        if self._first_cases is None:
            return None
        seconds, num_cases = self._clock() - self._first_cases[0], self.num_done - self._first_cases[1]
        return num_cases / seconds if seconds > 0 and num_cases >= FEWEST else None

    def _pace(self) -> str:
        rate = self._rate()
        return "" if rate is None else f"{number(rate)}/s"

    def _time_left(self) -> str:
        """The time left, by the measured speed alone; before the first case, how long the start has taken."""
        if self._first_cases is None:
            return f"{STARTING} for {round(self._clock() - self._start_time)} s"
        rate = self._rate()
        if self.num_wanted is None or rate is None:
            return ""
        seconds_left = round(max(0, self.num_wanted - self.num_done) / rate)
        return f"{seconds_left // 60}:{seconds_left % 60:02d} left"

    def _failure_words(self) -> str:
        return plural(self.failures, "failure") if self.failures else "no failure"

    def _show(self) -> None:
        if self._bar and self._task is not None:
            # The bar's own estimate would take the start for the run's speed.
            pace, time_left, failures = self._pace(), self._time_left(), self._failure_words()
            note = self._activity or self._power_words
            self._bar.update(
                self._task, completed=self.num_done, pace=pace, left=time_left, failures=failures, note=note
            )
            return
        now = self._clock()
        if now - self._last_line_time >= self._every_s:
            self._last_line_time = now
            self._file.write(self.line() + "\n")
            self._file.flush()


def shows_bars(file: TextIO) -> bool:
    """Whether a person watches `file`: a terminal that can move its cursor, and no CI."""
    return not in_ci(os.environ) and os.environ.get("TERM", "") != "dumb" and file.isatty()
