"""Frames and futures: the results of launched steps until the host has taken them.

The host writes a placeholder for the tokens of a launched step. When the next step is launched, the device reads its
own tokens in the place of each placeholder (the future map of SGLang's overlapped scheduler).
"""

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


class Futures:
    """The tokens of each row that was launched and is not resolved yet, by their owner and not by their row."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, int], list[int]] = {}

    def put(self, place: Place, tokens: list[int]) -> None:
        """Keep the accepted tokens of a launched row."""
        self.blocks[place.number, place.placeholder] = list(tokens)

    def fill(self, number: int, tokens: list[int]) -> list[int]:
        """The tokens of request `number` with each placeholder replaced by the tokens for which it stands."""
        resolved: list[int] = []
        for token in tokens:
            resolved += [token] if token >= 0 else self.blocks[number, token]
        return resolved

    def drop(self, place: Place) -> None:
        """Forget the tokens of a row, which the host has taken or skipped."""
        self.blocks.pop((place.number, place.placeholder), None)

    def results(self, part: LaunchedRow, launched: Frame) -> list[int]:
        """The accepted tokens that the host reads for `part`: its own, whatever frame `launched` was launched last."""
        return part.verdict.accepted

    def is_counted(self, part: LaunchedRow, epoch: int, over: bool) -> bool:
        """Whether the results of `part` count for a request that is in `epoch`, and is `over` or not."""
        return part.place.epoch == epoch and not over
