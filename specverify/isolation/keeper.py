"""The keeper: a process that starts and ends the engines of one worker; and the worker's side of it.

The keeper imports the modules that every engine needs once, and then forks engines in milliseconds, so that a crash can
be shrunk like any other failure. It opens no backend itself. It adopts the processes that an engine leaves behind and
kills them when the engine ends. When the worker is gone, it kills every engine. On macOS, and on machines with an
Ascend device, whose driver torch loads by itself, forking after imports is not known to be safe; there an engine is a
fresh interpreter.

A keeper was forked by an ancestor (`specverify.isolation.ancestor`), or it starts on first use where engines are fresh
interpreters. It ends with the worker. An engine may stop its keeper or kill it: a stopped keeper is continued, and one
that does not come back is killed.

Control messages are JSON objects, one per line. The worker orders `start` (with two descriptors: the engine's end of
its connection, and the file for the engine's output) and `kill`; the keeper answers `started`, with its own process id,
and `ended`.
"""

import contextlib
import gc
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from specverify.isolation.handle import Handle
from specverify.isolation.lifeline import Bell, adopt_orphans, die_with, end_children, outlive_parent
from specverify.isolation.proc import STOPPED

CHUNK = 1 << 18
"""Bytes read at once from the control connection."""

TICK_S = 0.1
"""Seconds between two checks on a process for which we wait."""

STOPPED_TICKS = 10
"""Ticks for which a process must be stopped before it counts as stopped by an engine."""

KEEPER_S, ENDED_S = 600.0, 10.0
"""Time limits, in seconds, for a keeper's imports, and for the end of an engine that was killed."""

ENGINE = "specverify.isolation.engine"
"""The module of an engine's process; it imports all that every engine needs, including torch and our own engine."""


def launch(program: str, connection: int, *words: str) -> list[str]:
    """The command that runs `main` of module `program` in a fresh interpreter with this process's `sys.path`."""
    # `-c` instead of `-m`: the search path must be set before our package is looked up.
    body = f"import sys; sys.path[:] = {sys.path!r}; from {program} import main; main(*sys.argv[1:])"
    return [sys.executable, "-c", body, str(connection), str(os.getpid()), *words]


def forks() -> bool:
    """Whether an engine may be a fork of the keeper."""
    return sys.platform == "linux" and find_spec("torch_npu") is None


def import_engine() -> None:
    """Import the modules that every engine needs, before engines are forked from this process."""
    gc.disable()  # modules are no garbage, and collections during the imports took a quarter of their time
    import_module(ENGINE)
    gc.freeze()  # garbage collections in engines skip the shared modules, whose pages then stay uncopied
    gc.enable()


def main(control: str, worker: str) -> None:
    """Serve the process `worker` on descriptor `control` until the worker closes its end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    die_with(int(worker))  # during the imports the keeper does not watch the connection, and it has no engine yet
    adopt_orphans()
    forking = forks()
    if forking:
        import_engine()
    outlive_parent()  # from here on the keeper notices the worker's end itself, and ends its engines first
    Keeper(socket.socket(fileno=int(control)), forking).serve()
    os._exit(0)  # nothing is left to close, and the normal teardown of all modules takes seconds


class Keeper:
    """The loop of the keeper, which waits for orders of the worker and for ends of engines."""

    def __init__(self, control: socket.socket, forking: bool) -> None:
        self._control = control
        self._forking = forking
        # Each engine's process id, with its folder for temporary files: an engine that is killed removes none itself.
        self._engines: dict[int, str] = {}
        self._unread = b""
        self._handed: list[int] = []
        self._bell = Bell()

    def serve(self) -> None:
        """Carry out orders until the worker is gone; then end every engine and the processes that engines left."""
        while True:
            either: list[Any] = [self._control, self._bell]
            ready, _, _ = select.select(either, [], [])
            if self._bell in ready:
                self._bell.hush()
                self._reap()
            if self._control in ready and not self._obey():
                end_children(())
                for folder in self._engines.values():
                    shutil.rmtree(folder, ignore_errors=True)
                return

    def _obey(self) -> bool:
        """Carry out the orders that have arrived; False when the worker closed the connection."""
        try:
            raw, handed, _, _ = socket.recv_fds(self._control, CHUNK, 2)
        except OSError:
            raw = b""
            handed = []
        if not raw:
            return False
        self._unread += raw
        self._handed += handed
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            order = json.loads(line)
            if order["do"] == "start":
                connection, printed = self._handed[:2]
                del self._handed[:2]
                self._start(connection, printed, order["engine"])
            elif order["pid"] in self._engines:
                os.kill(order["pid"], signal.SIGKILL)  # not reaped yet, so that the id still belongs to the engine
        return True

    def _start(self, connection: int, printed: int, engine: dict[str, Any]) -> None:
        folder = tempfile.mkdtemp(prefix="specverify-")
        engine = {**engine, "temporary": folder}
        # A fork has the keeper's imports, which have read their variables already.
        if self._forking and not engine["variables"]:
            pid = os.fork()
            if pid == 0:
                self._become_engine(connection, printed, engine)
        else:
            command = launch(ENGINE, connection, str(printed), json.dumps(engine))
            # The keeper reaps by process id; Popen is only the way to start.
            pid = subprocess.Popen(command, pass_fds=(connection, printed), env=engine["environment"]).pid
        self._engines[pid] = folder
        # The engine holds its own copies; a copy left here would keep the connection open after its death.
        os.close(connection)
        os.close(printed)
        self._tell({"started": pid, "keeper": os.getpid()})

    def _become_engine(self, connection: int, printed: int, engine: dict[str, Any]) -> None:
        """Run the engine in the fork, without the keeper's descriptors; never return to the keeper's loop."""
        keeper = os.getppid()
        try:
            self._bell.give_up()
            os.close(self._control.fileno())
            from specverify.isolation.engine import serve

            serve(connection, printed, keeper, engine)
        except BaseException:  # the judge tells a process's last lines of output with its end
            traceback.print_exc()
        finally:
            os._exit(1)

    def _reap(self) -> None:
        """Reap every child that has ended; if it was an engine, kill what it left behind, and report its exit code."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._engines:
                folder = self._engines.pop(pid)
                end_children(self._engines)
                shutil.rmtree(folder, ignore_errors=True)
                self._tell({"ended": pid, "code": os.waitstatus_to_exitcode(status)})

    def _tell(self, fact: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the worker is gone, which the next `select` shows
            self._control.sendall(json.dumps(fact).encode() + b"\n")


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


class KeeperClient:
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
