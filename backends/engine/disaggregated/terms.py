"""Terms: what both sides of a pair know of each other.

The words in which a side tells that it failed are among them.
"""

from collections.abc import Callable, MutableSequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Semaphore
from pathlib import Path
from typing import Any

from specverify.backends.base import StageFailure, Unsupported
from specverify.backends.engine.handover.by_gloo import SIDES, GlooMailbox
from specverify.backends.engine.handover.by_shared_memory import SharedMemoryMailbox
from specverify.backends.engine.handover.mailbox import Mailbox, PeerLost
from specverify.backends.engine.handover.packet import BadHandOver
from specverify.backends.engine.seams import Seams
from specverify.reference.trace import Stage

DEVICES = {"shared-memory": "cpu", "gloo": "cpu", "nccl": "cuda", "hccl": "npu"}
"""What may carry a hand-over, each with the device that it needs."""


@dataclass(frozen=True)
class Terms:
    """What both sides of a pair are told.

    Attributes:
        seams: The seams of the engine.
        by: What carries the items; a key of DEVICES.
        folder: A folder of both sides.
        patience: Seconds without a sign of the other side after which it lags.
        waiting: Counts the letters that wait for each side, by its name.
        beats: Counts the signs of work of each side, in the order of SIDES; then 1 while the decode side awaits the
            other one. It lies in memory that all processes share.
    """

    seams: Seams
    by: str
    folder: Path
    patience: float
    waiting: dict[str, Semaphore]
    beats: MutableSequence[int]

    def mailbox(self, side: str, life: Connection) -> Mailbox:
        """The end of `side`; `life` is a wire that is closed by the other side's death alone.

        Raises:
            PeerLost: The other side does not join.
        """
        if self.by != "shared-memory":
            return GlooMailbox(self.folder, side, 3 * self.patience, self.by, DEVICES[self.by])
        other_side = SIDES[1 - SIDES.index(side)]
        # Nothing is ever sent over `life`, so that only its end can be there to be read.
        return SharedMemoryMailbox(
            self.folder, side, other_side, self.waiting[side], self.waiting[other_side], life.poll
        )

    def beat(self, side: str) -> None:
        """Tell that `side` is at work."""
        self.beats[SIDES.index(side)] += 1


FAILURES: dict[str, Callable[[Any], Exception]] = {
    "unsupported": Unsupported,
    "stopped": lambda arguments: StageFailure(*arguments),
    "raised": RuntimeError,
    "lost": PeerLost,
}
"""The exception for each word of a failed side."""


def failure(error: Exception) -> tuple[str, Any]:
    """A word for the kind of failure, and what another process needs to raise it again."""
    if isinstance(error, PeerLost) or isinstance(error.__cause__, PeerLost):
        return "lost", " ".join(str(error if isinstance(error, PeerLost) else error.__cause__).split())
    if isinstance(error, StageFailure):
        return "stopped", (error.stage, error.why)
    if isinstance(error, BadHandOver):
        return "stopped", (Stage.COMMITTED, f"BadHandOver: {error}")
    if isinstance(error, Unsupported):
        return "unsupported", str(error)
    return "raised", f"{type(error).__name__}: {error}"
