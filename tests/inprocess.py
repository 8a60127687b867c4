"""Worker processes that are calls in this process, so that a command under test costs no five seconds more."""

import queue
import signal
import threading
from collections.abc import Callable
from typing import Any


class Here:
    """A stand-in for multiprocessing's spawn context."""

    Event = staticmethod(threading.Event)
    Queue: Any = staticmethod(queue.Queue)

    class Process:
        """A worker that has ended when `start` returns."""

        def __init__(self, target: Callable[..., None], args: tuple[Any, ...], daemon: bool) -> None:
            self.target, self.args, self.exitcode = target, args, 0

        def start(self) -> None:
            before = signal.getsignal(signal.SIGINT)
            try:
                self.target(*self.args)
            finally:
                signal.signal(signal.SIGINT, before)

        def join(self, timeout: float) -> None: ...

        def is_alive(self) -> bool:
            return False
