"""The worker's side of the keeper: orders to start and to kill engines.

The keeper was forked by the campaign's ancestor (`specverify.isolation.ancestor`), or by one of this process's own, or
it starts on first use where engines are fresh interpreters. It ends with the worker. An engine may stop its keeper or
kill it: a stopped keeper is continued, and one that does not come back is killed.
"""

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from typing import Any

from specverify.isolation.ancestor import Ancestor, start_ancestor
from specverify.isolation.handle import Handle
from specverify.isolation.keeper import launch
from specverify.isolation.proc import STOPPED

TICK_S = 0.1
"""Seconds between two checks on a process for which we wait."""

STOPPED_TICKS = 10
"""Ticks for which a process must be stopped before it counts as stopped by an engine."""

KEEPER_S, ENDED_S = 600.0, 10.0
"""Time limits, in seconds, for a keeper's imports, and for the end of an engine that was killed."""

CHUNK = 1 << 16
"""Bytes read at once."""


class Lost(Exception):
    """A process gave no answer.

    Attributes:
        how: The end of the process, as the predicate of a sentence that begins with "the backend's process".
        last_lines: The last lines that the process printed.
        hung: Whether the process was ended at the time limit.
    """

    def __init__(self, how: str, last_lines: tuple[str, ...] = (), hung: bool = False) -> None:
        super().__init__(how)
        self.how = how
        self.last_lines = last_lines
        self.hung = hung


class Keeping:
    """The keeper of this process: the one at the other end of `control`, or a fresh interpreter."""

    def __init__(self, control: socket.socket | None = None) -> None:
        self._keeper: subprocess.Popen[bytes] | None = None
        if control is None:
            control, keeper_end = socket.socketpair()
            with keeper_end:
                self._keeper = subprocess.Popen(
                    launch("specverify.isolation.keeper", keeper_end.fileno()),
                    pass_fds=(keeper_end.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                )
        self.control = control
        self.owner = os.getpid()
        self._unread = b""
        self._exit_codes: dict[int, int] = {}
        self._started_pids: list[int] = []
        self._served = False
        # Known when the keeper has started its first engine; before, no engine can have harmed it.
        self.process: Handle | None = None

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
        while not self._started_pids:
            self.awaken()
            if time.monotonic() > until or not self.listen(TICK_S):
                raise Lost("could not be started: its keeper ended or does not answer")
        return self._started_pids.pop()

    def kill(self, pid: int) -> None:
        """Kill an engine and all processes that it started; return when the keeper has reaped the engine.

        A keeper that does not answer is killed; its ancestor then kills what it leaves.
        """
        with contextlib.suppress(OSError):
            self.control.sendall(json.dumps({"do": "kill", "pid": pid}).encode() + b"\n")
        if not self._wait(lambda: pid in self._exit_codes):
            self._kill_keeper()

    def _wait(self, is_over: Callable[[], bool]) -> bool:
        """Listen until `is_over`, or the keeper has ended; False where it has not after ENDED_S."""
        until = time.monotonic() + ENDED_S
        while not is_over():
            self.awaken()
            if time.monotonic() > until:
                return False
            if not self.listen(TICK_S):
                break
        return True

    def awaken(self) -> None:
        """Continue the keeper, which an engine may have stopped."""
        if self.process is not None:
            self.process.send(signal.SIGCONT)

    def is_stopped(self) -> bool:
        """Whether the keeper is stopped, and stays so for a moment.

        A run that is suspended as a whole and continued has its processes back one after the other.
        """
        if self.process is None:
            return False
        state = self.process.settled_state()
        ticks = 0
        while state == STOPPED and ticks < STOPPED_TICKS:
            time.sleep(TICK_S)
            state = self.process.settled_state()
            ticks += 1
        return state == STOPPED

    def is_dead(self) -> bool:
        """Whether the keeper has ended."""
        return self.process is not None and self.process.has_ended()

    def _kill_keeper(self) -> None:
        if self.process is not None:
            self.process.send(signal.SIGKILL)

    def exit_code(self, pid: int) -> int | None:
        """The exit code of an engine that has ended, negative for a signal; None while it lives."""
        return self._exit_codes.get(pid)

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
        self._unread += raw
        *lines, self._unread = self._unread.split(b"\n")
        for fact in map(json.loads, lines):
            if "started" in fact:
                self._started_pids.append(fact["started"])
                self.process = self.process or Handle(fact["keeper"])
            else:
                self._exit_codes[fact["ended"]] = fact["code"]
        return bool(raw)

    @property
    def usable(self) -> bool:
        """Whether this very process (and no parent of it, before a fork) has the keeper, and the keeper lives."""
        if self.owner != os.getpid() or self.is_dead():
            return False
        return _open(self.control) if self._keeper is None else self._keeper.poll() is None

    def close(self) -> None:
        """End the keeper, and with it every engine."""
        # A fork of this process must not wait for a keeper that is not its own.
        is_owner = self.owner == os.getpid()
        if is_owner and self._keeper is None and self._served:
            with contextlib.suppress(OSError):
                self.control.shutdown(socket.SHUT_WR)
            # A keeper that is no child of this process closes its end when its engines are dead.
            if not self._wait(lambda: False):
                self._kill_keeper()
        self.control.close()
        if is_owner and self._keeper is not None:
            self.awaken()
            self._keeper.wait()
        if self.process is not None:
            self.process.close()


def _open(control: socket.socket) -> bool:
    """Whether the other end of `control` is open; what has arrived stays there."""
    ready, _, _ = select.select([control], [], [], 0)
    try:
        return not ready or bool(control.recv(1, socket.MSG_PEEK))
    except OSError:
        return False


_keeping: list[Keeping] = []
_ancestors: dict[int, Ancestor] = {}
"""The ancestor that a process started for itself, by the id of that process: a fork has none."""


def take_keeper(control: socket.socket) -> None:
    """Take the keeper at the other end of `control` as this process's own."""
    _keeping.append(Keeping(control))
    atexit.register(end_keeping)


def keeping() -> Keeping:
    """The keeper of this process, which is started if there is none."""
    # The keeper died, or this process is a fork: a new keeper is needed.
    if _keeping and not _keeping[0].usable:
        _keeping.pop().close()
    if not _keeping:
        _keeping.append(Keeping(_forked_keeper()))
        atexit.register(end_keeping)
    return _keeping[0]


def _forked_keeper() -> socket.socket | None:
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


def end_keeping() -> None:
    """End the keeper of this process, if there is one."""
    while _keeping:
        _keeping.pop().close()
    ancestor = _ancestors.pop(os.getpid(), None)
    if ancestor is not None:
        ancestor.end()
