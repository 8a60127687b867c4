"""The seams of overlap: the decisions that a planted fault may replace."""

from collections.abc import Callable
from dataclasses import dataclass

from specverify.backends.engine.overlap.frame import Frame, LaunchedRow
from specverify.backends.engine.overlap.futures import Futures
from specverify.backends.engine.overlap.reservation import reserved_columns
from specverify.backends.engine.request import Request
from specverify.backends.engine.step.state import Emission


def results(part: LaunchedRow, launched: Frame) -> list[int]:
    """The accepted tokens that the host reads for `part`: its own, whatever frame was launched last."""
    return part.verdict.accepted


def is_counted(part: LaunchedRow, epoch: int, over: bool) -> bool:
    """Whether the results of `part` count for a request that is in `epoch`, and is `over` or not."""
    return part.place.epoch == epoch and not over


def read(request: Request, part: LaunchedRow) -> Emission:
    """The emitted tokens of `part`; stop rules and grammar read the accepted tokens once, whoever asks first."""
    if part.emission is None:
        part.emission = request.emit(part.verdict)
    return part.emission


@dataclass(frozen=True)
class OverlapSeams:
    """The functions of overlap; the defaults are the fault-free engine.

    Attributes:
        reserved_columns: From the rows of the largest block to the columns that a launch reserves.
        futures: The class of the device's tokens.
        results: From a part and the frame that was launched last to the accepted tokens of the part.
        is_counted: From a part, the request's epoch and whether the request is over to whether the results count.
        read: From a request and a part to the emitted tokens.
    """

    reserved_columns: Callable[[int], int] = reserved_columns
    futures: type[Futures] = Futures
    results: Callable[[LaunchedRow, Frame], list[int]] = results
    is_counted: Callable[[LaunchedRow, int, bool], bool] = is_counted
    read: Callable[[Request, LaunchedRow], Emission] = read
