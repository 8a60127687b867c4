"""The ancestor: the process of a campaign from which keepers are forked.

It imports what every engine needs once, which takes seconds of a processor. A campaign starts its ancestor before its
workers, whose own imports then run beside it. A keeper that was forked here serves its worker as one that the worker
started itself. The ancestor ends with the campaign; its keepers end with their workers. A keeper that is killed leaves
its engines and what they started to the ancestor, which kills them. Where an engine must be a fresh interpreter
(`specverify.isolation.keeper.forks`), there is no ancestor.

One byte is an order for one keeper, and a descriptor comes with it: the keeper's end of its connection.
"""

import atexit
import contextlib
import os
import select
import signal
import socket
import subprocess
from typing import Any

from specverify.isolation.keeper import Keeper, KeeperClient, forks, import_engine, launch
from specverify.isolation.lifeline import Bell, adopt_orphans, die_with, end_children, outlive_parent

ORDER = b"k"
"""The order for one keeper."""


class Ancestor:
    """The ancestor of this process's keepers."""

    def __init__(self) -> None:
        self._control, ancestor_end = socket.socketpair()
        with ancestor_end:
            self._process = subprocess.Popen(
                launch("specverify.isolation.ancestor", ancestor_end.fileno()),
                pass_fds=(ancestor_end.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C at the terminal is the campaign's
            )

    def keeper(self) -> socket.socket | None:
        """The worker's end of the connection to a new keeper, which answers when its imports are done.

        None where the ancestor has ended: a worker then starts a keeper itself.
        """
        worker_end, keeper_end = socket.socketpair()
        with keeper_end:
            self._process.send_signal(signal.SIGCONT)  # an engine may have stopped it
            try:
                socket.send_fds(self._control, [ORDER], [keeper_end.fileno()])
            except OSError:
                worker_end.close()
                return None
        return worker_end

    def end(self) -> None:
        """End the ancestor; keepers that it forked go on."""
        self._control.close()
        self._process.kill()  # it holds nothing, and during its imports it hears nothing
        self._process.wait()


def start_ancestor() -> Ancestor | None:
    """A new ancestor, or None where engines are fresh interpreters."""
    return Ancestor() if forks() else None


_own_keeper: list[KeeperClient] = []
"""The keeper of this process, if it has one."""

_ancestors: dict[int, Ancestor] = {}
"""The ancestor that a process started for itself, by the id of that process: a fork has none."""


def take_keeper(control: socket.socket) -> None:
    """Take the keeper at the other end of `control` as this process's own."""
    _own_keeper.append(KeeperClient(control))
    atexit.register(end_keeper)


def own_keeper() -> KeeperClient:
    """The keeper of this process, which is started if there is none."""
    # The keeper died, or this process is a fork: a new keeper is needed.
    if _own_keeper and not _own_keeper[0].usable:
        _own_keeper.pop().close()
    if not _own_keeper:
        _own_keeper.append(KeeperClient(_forked_control()))
        atexit.register(end_keeper)
    return _own_keeper[0]


def _forked_control() -> socket.socket | None:
    """The connection to a keeper that this process's own ancestor forks; None where engines are fresh interpreters."""
    ancestor = _ancestors.get(os.getpid())
    control = None if ancestor is None else ancestor.keeper()
    if control is not None:
        return control
    if ancestor is not None:
        ancestor.end()
    ancestor = start_ancestor()
    if ancestor is None:
        return None
    _ancestors[os.getpid()] = ancestor
    return ancestor.keeper()


def end_keeper() -> None:
    """End the keeper of this process, if there is one."""
    while _own_keeper:
        _own_keeper.pop().close()
    ancestor = _ancestors.pop(os.getpid(), None)
    if ancestor is not None:
        ancestor.end()


def main(control: str, campaign: str) -> None:
    """Serve the process `campaign` on descriptor `control` until the campaign ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    die_with(int(campaign))
    adopt_orphans()
    import_engine()
    orders = socket.socket(fileno=int(control))
    bell = Bell()
    keepers: set[int] = set()
    while True:
        either: list[Any] = [orders, bell]
        ready, _, _ = select.select(either, [], [])
        if bell in ready:
            bell.hush()
            _reap(keepers)
        if orders in ready:
            order, handed, _, _ = socket.recv_fds(orders, 1, 1)
            if not order:
                os._exit(0)
            keepers.add(_fork_keeper(orders, bell, handed[0]))
            os.close(handed[0])


def _reap(keepers: set[int]) -> None:
    """Wait for the children that have ended, and kill what a keeper left: every child that is no keeper."""
    with contextlib.suppress(ChildProcessError):
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            keepers.discard(pid)
    end_children(keepers)


def _fork_keeper(orders: socket.socket, bell: Bell, control: int) -> int:
    """The process id of a new keeper, which serves the worker at the other end of `control`."""
    pid = os.fork()
    if pid == 0:
        orders.close()
        bell.give_up()
        adopt_orphans()
        # The kernel does not hand `die_with` on to a fork: a keeper ends its engines first.
        outlive_parent()
        Keeper(socket.socket(fileno=control), forking=True).serve()
        os._exit(0)
    return pid
