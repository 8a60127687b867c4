"""The ancestor: the process of a campaign from which keepers are forked.

It imports what every engine needs once, which takes seconds of a processor. A campaign starts its ancestor before its
workers, whose own imports then run beside it. A keeper that was forked here serves its worker as one that the worker
started itself. The ancestor ends with the campaign; its keepers end with their workers. Where an engine must be a fresh
interpreter (`specverify.isolation.keeper.forks`), there is no ancestor.

One byte is an order for one keeper, and a descriptor comes with it: the keeper's end of its connection.
"""

import os
import signal
import socket
import subprocess

from specverify.isolation.keeper import Keeper, forks, imported, launch
from specverify.isolation.lifeline import adopt_orphans, die_with

ORDER = b"k"
"""The order for one keeper."""


class Ancestor:
    """The ancestor of this process's keepers."""

    def __init__(self) -> None:
        self._control, its = socket.socketpair()
        with its:
            self._process = subprocess.Popen(
                launch("specverify.isolation.ancestor", its.fileno()),
                pass_fds=(its.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C at the terminal is the campaign's
            )

    def keeper(self) -> socket.socket | None:
        """The worker's end of the connection to a new keeper, which answers when its imports are done.

        None where the ancestor has ended: a worker then starts a keeper itself.
        """
        mine, its = socket.socketpair()
        with its:
            try:
                socket.send_fds(self._control, [ORDER], [its.fileno()])
            except OSError:
                mine.close()
                return None
        return mine

    def end(self) -> None:
        """End the ancestor; keepers that it forked go on."""
        self._control.close()
        self._process.kill()  # it holds nothing, and during its imports it hears nothing
        self._process.wait()


def started() -> Ancestor | None:
    """A new ancestor, or None where engines are fresh interpreters."""
    return Ancestor() if forks() else None


def main(control: str, campaign: str) -> None:
    """Serve the process `campaign` on descriptor `control` until the campaign ends."""
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, signal.SIG_IGN)
    die_with(int(campaign))
    imported()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a keeper: the kernel reaps it
    orders = socket.socket(fileno=int(control))
    while True:
        order, handed, _, _ = socket.recv_fds(orders, 1, 1)
        if not order:
            os._exit(0)
        if os.fork() == 0:
            orders.close()
            adopt_orphans()
            # The kernel does not hand `die_with` on to a fork: a keeper ends its engines first.
            Keeper(socket.socket(fileno=handed[0]), forking=True).serve()
            os._exit(0)
        os.close(handed[0])
