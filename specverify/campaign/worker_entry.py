"""The first steps of a worker process: the campaign's death ends it even during its imports, which take seconds.

This module imports the standard library and the lifeline alone. What a worker is told arrives as bytes, so that nothing
is imported to read it before the kernel knows whose death ends the process.
"""

import os
import signal
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

from specverify.isolation.lifeline import die_with


def packed(*told: Any) -> bytes:
    """The bytes in which `begin` finds the orders `told` to a worker."""
    return bytes(ForkingPickler.dumps(told))


def begin(parent: int, connection: Connection, told: bytes) -> None:
    """Leave interrupts to the process `parent`, end with it, and go to work on what `packed` holds."""
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, signal.SIG_IGN)
    die_with(parent)
    os.dup2(2, 1)  # what a processor or a tokenizer prints is no part of our output
    from specverify.campaign.worker import enter

    plan, deadline, judged = ForkingPickler.loads(told)
    enter(plan, connection, deadline, judged)
