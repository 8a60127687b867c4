"""Messages between the campaign and its workers.

Verdicts (`specverify.properties.verdict.finding.Verdict`) are sent as they are, without their traces, and so is what
runs left behind (`specverify.properties.residue.Residue`).
"""

from dataclasses import dataclass

from specverify.properties.streams import ExpectedDraws
from specverify.properties.tally import Failure
from specverify.properties.verdict import run_log
from specverify.properties.verdict.finding import Verdict
from specverify.reference.case import Case
from specverify.reference.trace import Stage

STOP, ENOUGH = "stop", "enough"
"""The campaign's orders to a worker: end at once; or draw no more cases, but finish shrinking a failure."""


@dataclass(frozen=True)
class Opened:
    """A worker's backend is open; the fields are the backend's declaration and the worker's part of the run.

    `tokens_alone` says that the reference shows tokens alone. `sampling` says what a drawn case adds to the sampling of
    the run, and is None where no case does. `labels` are those that a drawn case may have, as places in
    `specverify.properties.verdict.coverage.LABELS`; None where no case is drawn. `varied` is the number of prompts of
    which variants run, and that of all; None where cases are drawn.
    """

    name: str
    device: str
    emulated: bool
    environment: dict[str, str]
    invariants: tuple[str, ...]
    wanted: int
    reveals: frozenset[Stage] = frozenset()
    tokens_alone: bool = False
    sampling: ExpectedDraws | None = None
    excluded: tuple[str, ...] = ()
    labels: tuple[int, ...] | None = None
    varied: tuple[int, int] | None = None


@dataclass(frozen=True)
class Estimated:
    """One line about the time, or the memory, that the run will take."""

    line: str


@dataclass(frozen=True)
class Began:
    """A worker begins to judge `case`; if the worker dies, the campaign knows the case by this message."""

    case: Case


@dataclass(frozen=True)
class Passed:
    """A saved case was passed over, since this run cannot judge it; `why` says so."""

    case: str
    why: str


@dataclass(frozen=True)
class Found:
    """A case differs; the failure is sent as drawn, before it is shrunk."""

    failure: Failure


@dataclass(frozen=True)
class Located:
    """The shrunk form of the failure in the worker's last `Found`; `shrink_s` is the time that shrinking took."""

    failure: Failure
    shrink_s: float


@dataclass(frozen=True)
class Trouble:
    """One line about a problem after which the worker goes on."""

    why: str


@dataclass(frozen=True)
class Done:
    """A worker has finished; `exhausted` says that there were no more new cases to draw."""

    exhausted: bool = False


@dataclass(frozen=True)
class Broken:
    """A worker cannot go on: one line of explanation, and the exit code for the run."""

    why: str
    code: int


@dataclass(frozen=True)
class Died:
    """A worker's process ended without `Done` or `Broken`; `how` names the signal or the exit code."""

    how: str


@dataclass(frozen=True)
class Ended:
    """A campaign has ended; its tally follows from all messages before, and from this one.

    Attributes:
        seconds: Wall time.
        wanted: Number of cases that it should have judged.
        errors: Reasons why it could not judge all of them, one line each.
        code: The exit code where a start failed or a worker was lost, else None.
        replaced: Workers that died and were replaced.
        interrupted: The signal that ended it early, or None.
        late: Whether its time budget was used up.
        exhausted: Whether there were no more cases to draw.
    """

    seconds: float
    wanted: int
    errors: tuple[str, ...] = ()
    code: int | None = None
    replaced: int = 0
    interrupted: str | None = None
    late: bool = False
    exhausted: bool = False


def event_of(message: object) -> str | None:
    """The event of a worker's timeline that `message` tells of; None for a message that is no event."""
    if isinstance(message, Verdict):
        return run_log.DIFFERED if message.findings else run_log.JUDGED if message.judged else run_log.UNJUDGED
    kinds = {Opened: run_log.OPENED, Found: run_log.FOUND, Located: run_log.LOCATED, Died: run_log.DIED}
    return kinds.get(type(message), run_log.ENDED if isinstance(message, (Done, Broken)) else None)
