"""The first steps of a worker process, before its imports.

The worker must end with the campaign even during its imports, which take seconds. So this module imports only the
standard library and the two modules about parents and keepers. The orders arrive as bytes, and they are unpickled only
after the kernel knows the parent whose death ends this process.
"""

import os
import signal
import socket
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

from specverify.isolation import ancestor
from specverify.isolation.lifeline import die_with


def pack_order(*order: Any) -> bytes:
    """The orders `order` to a worker, pickled for `begin`."""
    return bytes(ForkingPickler.dumps(order))


def begin(parent: int, connection: Connection, order: bytes, keeper: socket.socket | None = None) -> None:
    """Ignore interrupts (the process `parent` handles them), tie this process to `parent`, and start the worker.

    Its engines are those of the keeper at the other end of `keeper`, if there is one.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    die_with(parent)
    if keeper is not None:
        ancestor.take_keeper(keeper)
    os.dup2(2, 1)  # prints of processors and tokenizers go to standard error, not into our output
    # Imported here, not above: these imports take seconds, and this process must be tied to its parent first.
    from specverify.campaign.worker import enter

    plan, deadline, judged = ForkingPickler.loads(order)
    enter(plan, connection, deadline, judged)
