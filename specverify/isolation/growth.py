"""Growth: a quantity of a process that rises run by run, as by a leak; a cache makes it jump once.

A quantity grows when it has risen RISES times in a row by at least its step, from run to run, or from the least value
of 8 runs (or 64) to the least of the next 8 (or 64). A pool of threads that starts once, an allocator that takes one
more arena, or a peak inside a run shows no such series.
"""

from dataclasses import dataclass

from specverify.reference.case import Case

RISES = 8
"""Rises in a row that make a trend."""

BLOCKS = (1, 8, 64)
"""Numbers of runs between two values that are compared: by the last one, a leak of an eighth of a step is seen too."""


@dataclass(frozen=True)
class Growth:
    """A trend that was seen.

    Attributes:
        block: The runs of one stretch; a number of BLOCKS.
        first: The least value in the stretch before the first rise.
        last: The least value in the last stretch.
        case: The case in which the series began; None where a run was none of a case.
    """

    block: int
    first: int
    last: int
    case: Case | None


class Series:
    """The least values of stretches of `block` runs, and how often in a row they rose by `step` or more."""

    def __init__(self, block: int, step: int) -> None:
        self._block = block
        self._step = step
        self._values: list[int] = []
        self._rises = 0
        self._last: int | None = None
        self._began: tuple[int, Case | None] = (0, None)
        self._case: Case | None = None

    def add(self, value: int, case: Case | None) -> Growth | None:
        """Take the value after a run of `case`; the trend, when it is complete."""
        if not self._values:
            self._case = case
        self._values.append(value)
        if len(self._values) < self._block:
            return None
        least, last = min(self._values), self._last
        self._values.clear()
        self._last = least
        if last is None or least < last + self._step:
            self._rises = 0
            return None
        if not self._rises:
            self._began = (last, self._case)
        self._rises += 1
        return Growth(self._block, self._began[0], least, self._began[1]) if self._rises == RISES else None


class Trend:
    """One quantity of a process, over stretches of each length in BLOCKS."""

    def __init__(self, step: int) -> None:
        self._series = [Series(block, step) for block in BLOCKS]

    def add(self, value: int, case: Case | None) -> Growth | None:
        """Take the value after a run of `case`; the trend, when one is complete."""
        growths = [series.add(value, case) for series in self._series]
        return next((growth for growth in growths if growth is not None), None)
