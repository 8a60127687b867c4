"""Frames: the results of launched steps until the host has taken them."""

from collections.abc import Callable
from dataclasses import dataclass

from specverify.backends.engine.step.state import Emission, Verification
from specverify.reference.trace import Committed


@dataclass(frozen=True)
class Place:
    """The owner of one row of a launched batch.

    Attributes:
        number: The request.
        epoch: How often the request had been evicted when the step was launched.
        frame: The number of the launch, counted from 0.
        row: The row of the request in the batch.
    """

    number: int
    epoch: int
    frame: int
    row: int

    @property
    def placeholder(self) -> int:
        """The number that stands for the tokens of this row among the host's tokens; negative, so no token."""
        return -1 - self.frame


@dataclass
class LaunchedRow:
    """The part of a frame that belongs to one request.

    Attributes:
        place: The request, its epoch, the frame and the row.
        verdict: The accepted path and what the step reveals; the host reads it when the frame is resolved.
        committed: The caches after the device's commit, which kept the whole path.
        emission: The emitted tokens, once the host has read them; a grammar reads them before the next launch.
    """

    place: Place
    verdict: Verification
    committed: Committed
    emission: Emission | None = None


@dataclass(frozen=True)
class Frame:
    """The results of one launch.

    Attributes:
        parts: One part for each request of the batch, by row.
        wait: Returns when the device has executed the launch.
    """

    parts: tuple[LaunchedRow, ...]
    wait: Callable[[], None]
