"""The worker's side of the keeper: orders to start and to kill engines.

The keeper was forked by the campaign's ancestor (`specverify.isolation.ancestor`), or it starts on first use. It ends
with the worker.
"""

import atexit
import contextlib
import json
import os
import select
import socket
import subprocess
import time
from typing import Any

from specverify.isolation.keeper import launch

TICK_S = 0.1
"""Seconds between two checks on a process for which we wait."""

KEEPER_S, ENDED_S = 600.0, 10.0
"""Time limits, in seconds, for a keeper's imports, and for the end of an engine that was killed."""

CHUNK = 1 << 16
"""Bytes read at once."""


class Lost(Exception):
    """A process gave no answer.

    Attributes:
        how: The end of the process, as the predicate of a sentence that begins with "the backend's process".
        said: The last lines that the process printed.
        hung: Whether the process was ended at the time limit.
    """

    def __init__(self, how: str, said: tuple[str, ...] = (), hung: bool = False) -> None:
        super().__init__(how)
        self.how = how
        self.said = said
        self.hung = hung


class Keeping:
    """The keeper of this process: the one at the other end of `control`, or a new one."""

    def __init__(self, control: socket.socket | None = None) -> None:
        self._keeper: subprocess.Popen[bytes] | None = None
        if control is None:
            control, its = socket.socketpair()
            with its:
                self._keeper = subprocess.Popen(
                    launch("specverify.isolation.keeper", its.fileno()),
                    pass_fds=(its.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                )
        self.control = control
        self.owner = os.getpid()
        self._held = b""
        self._ended: dict[int, int] = {}
        self._started: list[int] = []
        self._served = False

    def start(self, engine: dict[str, Any], connection: int, printed: int) -> int:
        """Start an engine with its end of the connection and its output file; return its process id.

        Raises:
            Lost: The keeper is gone or does not answer.
        """
        self._served = True
        order = json.dumps({"do": "start", "engine": engine}).encode() + b"\n"
        try:
            sent = socket.send_fds(self.control, [order], [connection, printed])
            # `send_fds` may send a part of the order; the descriptors travel with its first bytes.
            self.control.sendall(order[sent:])
        except OSError as why:
            raise Lost(f"could not be started: its keeper is gone ({why.strerror})") from None
        until = time.monotonic() + KEEPER_S
        while not self._started:
            if time.monotonic() > until or not self.listen(TICK_S):
                raise Lost("could not be started: its keeper ended or does not answer")
        return self._started.pop()

    def kill(self, pid: int) -> None:
        """Kill an engine and all processes that it started; return when the keeper has reaped the engine."""
        with contextlib.suppress(OSError):
            self.control.sendall(json.dumps({"do": "kill", "pid": pid}).encode() + b"\n")
        until = time.monotonic() + ENDED_S
        while pid not in self._ended and time.monotonic() < until and self.listen(TICK_S):
            pass

    def ended(self, pid: int) -> int | None:
        """The exit code of an engine that has ended, negative for a signal; None while it lives."""
        return self._ended.get(pid)

    def listen(self, seconds: float) -> bool:
        """Wait up to `seconds` for messages of the keeper and note them; False if the keeper is gone."""
        if self.control.fileno() < 0:  # closed, since another keeper took the place of a dead one
            return False
        ready, _, _ = select.select([self.control], [], [], seconds)
        if not ready:
            return True
        try:
            raw = self.control.recv(CHUNK)
        except OSError:
            return False
        self._held += raw
        *lines, self._held = self._held.split(b"\n")
        for fact in map(json.loads, lines):
            if "started" in fact:
                self._started.append(fact["started"])
            else:
                self._ended[fact["ended"]] = fact["code"]
        return bool(raw)

    @property
    def usable(self) -> bool:
        """Whether this very process (and no parent of it, before a fork) has the keeper, and the keeper lives."""
        if self.owner != os.getpid():
            return False
        return _open(self.control) if self._keeper is None else self._keeper.poll() is None

    def close(self) -> None:
        """End the keeper, and with it every engine."""
        # A fork of this process must not wait for a keeper that is not its own.
        mine = self.owner == os.getpid()
        if mine and self._keeper is None and self._served:
            with contextlib.suppress(OSError):
                self.control.shutdown(socket.SHUT_WR)
            # A keeper that is no child of this process closes its end when its engines are dead.
            until = time.monotonic() + ENDED_S
            while time.monotonic() < until and self.listen(TICK_S):
                pass
        self.control.close()
        if mine and self._keeper is not None:
            self._keeper.wait()


def _open(control: socket.socket) -> bool:
    """Whether the other end of `control` is open; what has arrived stays there."""
    ready, _, _ = select.select([control], [], [], 0)
    try:
        return not ready or bool(control.recv(1, socket.MSG_PEEK))
    except OSError:
        return False


_keeping: list[Keeping] = []


def take(control: socket.socket) -> None:
    """Take the keeper at the other end of `control` as this process's own."""
    _keeping.append(Keeping(control))
    atexit.register(end_keeping)


def keeping() -> Keeping:
    """The keeper of this process, which is started if there is none."""
    # The keeper died, or this process is a fork: a new keeper is needed.
    if _keeping and not _keeping[0].usable:
        _keeping.pop().close()
    if not _keeping:
        _keeping.append(Keeping())
        atexit.register(end_keeping)
    return _keeping[0]


def end_keeping() -> None:
    """End the keeper of this process, if there is one."""
    while _keeping:
        _keeping.pop().close()
