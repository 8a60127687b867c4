"""Interrupts: Ctrl-C, SIGTERM and SIGHUP ask a run to end and write its reports; names of signals."""

import signal
import threading
import time
from typing import Any

SIGNALS = {
    name: word
    for name, word in (("SIGINT", "Ctrl-C"), ("SIGTERM", "SIGTERM"), ("SIGHUP", "SIGHUP"))
    if hasattr(signal, name)
}
"""The signals that this system has, by name, each with the word that messages use for it."""


def signal_name(number: int) -> str:
    """The name of a signal, such as SIGSEGV; `signal 70` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Interrupts:
    """A context in which the first of SIGNALS is noted as a request to end; a later Ctrl-C raises KeyboardInterrupt.

    Attributes:
        word: The word for the first signal, or None.
        time_s: The time of the monotonic clock at the first signal.
    """

    def __init__(self) -> None:
        self.word: str | None = None
        self.time_s = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        # Only the main thread may set handlers; a run in another thread is ended by whoever started it.
        for name in SIGNALS if threading.current_thread() is threading.main_thread() else ():
            number = getattr(signal, name)
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        # A user who presses Ctrl-C again wants the run to end at once.
        if self.word is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.word is None:
            self.word = SIGNALS[signal.Signals(number).name]
            self.time_s = time.monotonic()
