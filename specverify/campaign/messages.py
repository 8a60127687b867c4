"""Messages between the campaign and its workers; verdicts cross as they are."""

from dataclasses import dataclass

from properties.tally import Failure
from reference.case import Case
from reference.trace import Stage

STOP, ENOUGH = "stop", "enough"
"""The campaign's orders to a worker: end at once, or draw no more cases and finish the one that differed."""


@dataclass(frozen=True)
class Opened:
    """A worker's backend is open: what it said of itself."""

    name: str
    device: str
    emulated: bool
    environment: dict[str, str]
    invariants: tuple[str, ...]
    wanted: int
    reveals: frozenset[Stage] = frozenset()


@dataclass(frozen=True)
class Began:
    """A worker is about to judge `case`: should the worker die, this is the case that it was at."""

    case: Case


@dataclass(frozen=True)
class Found:
    """A case differs; it is told as it was drawn, before any of the work of making it smaller."""

    failure: Failure


@dataclass(frozen=True)
class Located:
    """The same failure at its smallest, in place of what the worker's last `Found` told."""

    failure: Failure
    shrink_s: float


@dataclass(frozen=True)
class Trouble:
    """Something kept a worker from judging, and the worker goes on: one line."""

    why: str


@dataclass(frozen=True)
class Done:
    """A worker came to its end; `exhausted` says that there were no more new cases to draw."""

    exhausted: bool = False


@dataclass(frozen=True)
class Broken:
    """A worker could not go on: one line, and the exit code it asks for."""

    why: str
    code: int


@dataclass(frozen=True)
class Died:
    """A worker's process ended without a word: how."""

    how: str
