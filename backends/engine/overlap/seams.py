"""The seams of overlap: the decisions that a planted fault may replace."""

from collections.abc import Callable
from dataclasses import dataclass

from backends.engine.overlap.frame import Frame, Launched
from backends.engine.overlap.futures import Futures
from backends.engine.overlap.reservation import reserved
from backends.engine.request import Request
from backends.engine.step.state import Emission


def results(part: Launched, launched: Frame) -> list[int]:
    """The accepted tokens that the host reads for `part`: its own, whatever frame was launched last."""
    return part.verdict.accepted


def counts(part: Launched, epoch: int, over: bool) -> bool:
    """Whether the results of `part` count for a request that is in `epoch`, and is `over` or not."""
    return part.place.epoch == epoch and not over


def read(request: Request, part: Launched) -> Emission:
    """The emitted tokens of `part`; stop rules and grammar read the accepted tokens once, whoever asks first."""
    if part.emission is None:
        part.emission = request.emit(part.verdict)
    return part.emission


@dataclass(frozen=True)
class OverlapSeams:
    """The functions of overlap; the defaults are the fault-free engine.

    Attributes:
        reserved: From the rows of the largest block to the columns that a launch reserves.
        futures: The class of the device's tokens.
        results: From a part and the frame that was launched last to the accepted tokens of the part.
        counts: From a part, the request's epoch and whether the request is over to whether the results count.
        read: From a request and a part to the emitted tokens.
    """

    reserved: Callable[[int], int] = reserved
    futures: type[Futures] = Futures
    results: Callable[[Launched, Frame], list[int]] = results
    counts: Callable[[Launched, int, bool], bool] = counts
    read: Callable[[Request, Launched], Emission] = read
