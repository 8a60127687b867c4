"""What a worker tells the campaign, besides verdicts."""

from dataclasses import dataclass

from properties.tally import Failure


@dataclass(frozen=True)
class Opened:
    """A worker's backend is open: what it said of itself."""

    name: str
    device: str
    emulated: bool
    environment: dict[str, str]
    invariants: tuple[str, ...]
    wanted: int


@dataclass(frozen=True)
class Done:
    """A worker came to its end: what it found, and how long it spent making it smaller."""

    failure: Failure | None
    shrink_s: float


@dataclass(frozen=True)
class Broken:
    """A worker could not go on: one line, and the exit code it asks for."""

    why: str
    code: int
