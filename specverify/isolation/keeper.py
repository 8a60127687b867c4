"""The keeper: a process that starts and ends the engines of one worker.

The keeper imports the modules that every engine needs once, and then forks engines in milliseconds, so that a crash can
be shrunk like any other failure. It opens no backend itself. It adopts the processes that an engine leaves behind and
kills them when the engine ends. When the worker is gone, it kills every engine. On macOS, and on machines with an
Ascend device, whose driver torch loads by itself, forking after imports is not known to be safe; there an engine is a
fresh interpreter.

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
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from specverify.isolation.lifeline import Bell, adopt_orphans, die_with, end_children, outlive_parent

CHUNK = 1 << 18
"""Bytes read at once from the control connection."""

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
        if self._forking:
            pid = os.fork()
            if pid == 0:
                self._become_engine(connection, printed, engine)
        else:
            command = launch(ENGINE, connection, str(printed), json.dumps(engine))
            # The keeper reaps by process id; Popen is only the way to start.
            pid = subprocess.Popen(command, pass_fds=(connection, printed)).pid
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
