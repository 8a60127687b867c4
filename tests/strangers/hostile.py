"""Hostile engines for tests: each decodes with the oracle, and on one prompt does something that no engine should."""

import contextlib
import ctypes
import faulthandler
import os
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from backends.base import Declaration
from reference.case import Case
from reference.oracle.decoder import Oracle
from reference.trace import Stage, Trace

MARK = 3
"""The first token of the prompt on which an engine is hostile; such a prompt has MARK tokens."""


class Unprintable(Exception):
    """An exception that cannot be put into words."""

    def __str__(self) -> str:
        """Fail."""
        raise ValueError("no words")


def raises(error: BaseException) -> Callable[[], None]:
    """Raise `error`."""

    def act() -> None:
        raise error

    return act


def signals(name: str) -> Callable[[], None]:
    """Send this process the signal `name`, whose handler is the kernel's."""

    def act() -> None:
        number = getattr(signal, name)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    return act


def recurses() -> None:
    """Call itself without end."""
    recurses()


def spins() -> None:
    """Never come back, in Python."""
    while True:
        pass


def deadlocks() -> None:
    """Wait for a lock that this thread holds."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def counts() -> None:
    """Never come back, in C, with the interpreter's lock held."""
    sum(range(10**13))


def hoards() -> None:
    """Take memory without end."""
    held = []
    while True:
        held.append(np.ones(8 << 20))


def takes_at_once() -> None:
    """Take too much memory in one piece, and hold it for a while."""
    held = np.ones(1 << 28)
    time.sleep(2)
    del held


def floods() -> None:
    """Print a great deal, then fall over."""
    line = "x" * 1023 + "\n"
    for _ in range(100_000):
        sys.stdout.write(line)
    raise RuntimeError("after the flood")


def prints_bytes() -> None:
    """Print what is no text, then fall over."""
    os.write(1, bytes(range(256)) * 4)
    os.write(2, b"\x1b[2J\x1b[31mlast words\x07\n")
    os._exit(9)


def forks() -> None:
    """Come back twice."""
    os.fork()


def leaves_a_copy() -> None:
    """Leave a copy of the process running."""
    if os.fork() == 0:
        time.sleep(600)
        os._exit(0)


def daemonises() -> None:
    """Leave a copy of a copy running, in a session of its own."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)


def forks_many() -> None:
    """Leave many copies running."""
    for _ in range(12):
        leaves_a_copy()


def in_thread(act: Callable[[], object]) -> Callable[[], None]:
    """Do `act` in a thread, and wait for it."""

    def run() -> None:
        thread = threading.Thread(target=act)
        thread.start()
        thread.join()

    return run


def closes() -> None:
    """Close every descriptor but the standard ones."""
    os.closerange(3, 4096)


def scribbles() -> None:
    """Write into every descriptor that is open, as if it were a log."""
    for descriptor in range(3, 256):
        with contextlib.suppress(OSError):
            os.write(descriptor, b"INFO a line of a log that lost its way\n" * 8)


def blocks_on_input() -> None:
    """Ask somebody who is not there."""
    input("go on? ")


def torch_state(name: str, *values: Any) -> Callable[[], None]:
    """Call one of torch's setters; `dtype:NAME` stands for a dtype."""

    def act() -> None:
        import torch

        wanted = [getattr(torch, one[6:]) if str(one).startswith("dtype:") else one for one in values]
        getattr(torch, name)(*wanted)

    return act


def shrinks_limits() -> None:
    """Allow this process no file of any size."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    with open("/dev/shm/hostile-engine" if os.path.isdir("/dev/shm") else "hostile-engine", "w") as file:
        file.write("x")


DEEDS: dict[str, Callable[[], object]] = {
    "exit": lambda: sys.exit(0),
    "exit-1": lambda: sys.exit(1),
    "exit-words": lambda: sys.exit("no license"),
    "system-exit": raises(SystemExit()),
    "generator-exit": raises(GeneratorExit()),
    "keyboard-interrupt": raises(KeyboardInterrupt()),
    "base-exception": raises(BaseException("rock bottom")),
    "stop-iteration": raises(StopIteration(3)),
    "memory-error": raises(MemoryError()),
    "unprintable": raises(Unprintable()),
    "long-words": raises(RuntimeError("a\n" * 100_000)),
    "control-characters": raises(RuntimeError("\x1b[2J\x00\ud800")),
    "recursion": recurses,
    "leave-0": lambda: os._exit(0),
    "leave-7": lambda: os._exit(7),
    "abort": os.abort,
    "null-pointer": lambda: ctypes.string_at(0),
    "stack-overflow": lambda: faulthandler._stack_overflow(),  # type: ignore[attr-defined]
    "killed": signals("SIGKILL"),
    "terminated": signals("SIGTERM"),
    "bus-error": signals("SIGBUS"),
    "floating-point": signals("SIGFPE"),
    "alarm": signals("SIGALRM"),
    "other-program": lambda: os.execv("/bin/true", ["true"]),
    "spin": spins,
    "sleep": lambda: time.sleep(600),
    "deadlock": deadlocks,
    "count-in-c": counts,
    "wait-for-nobody": lambda: select.select([os.pipe()[0]], [], []),
    "pause": signal.pause,
    "stopped": signals("SIGSTOP"),
    "ask": blocks_on_input,
    "hoard": hoards,
    "take-at-once": takes_at_once,
    "flood": floods,
    "bytes": prints_bytes,
    "fork": forks,
    "copy-left": leaves_a_copy,
    "daemon-left": daemonises,
    "copies-left": forks_many,
    "thread-leaves": in_thread(lambda: os._exit(5)),
    "thread-falls": in_thread(lambda: ctypes.string_at(0)),
    "thread-hangs": in_thread(lambda: time.sleep(600)),
    "close": closes,
    "scribble": scribbles,
    "dtype": torch_state("set_default_dtype", "dtype:float64"),
    "device": torch_state("set_default_device", "meta"),
    "gradients": torch_state("set_grad_enabled", False),
    "threads": torch_state("set_num_threads", 3),
    "precision": torch_state("set_float32_matmul_precision", "medium"),
    "denormals": torch_state("set_flush_denormal", True),
    "numpy-errors": lambda: np.seterr(all="raise"),
    "folder": lambda: os.chdir("/"),
    "limits": shrinks_limits,
}
"""What each does on the marked prompt; most then decode as if nothing had happened."""

ANSWERS: dict[str, Callable[[Trace], object]] = {
    "nothing": lambda trace: None,
    "tokens": lambda trace: list(trace.output),
    "a-dict": vars,
    "a-generator": lambda trace: (step for step in trace.steps),
    "the-class": lambda trace: Trace,
    "words": str,
}
"""What some return in place of a trace."""


class Hostile:
    """An engine that decodes with the oracle."""

    def __init__(self, act: Callable[[], object], answer: Callable[[Trace], object]) -> None:
        self.declaration = Declaration(
            name="hostile",
            device="cpu",
            reveals=frozenset({Stage.DRAFTED, Stage.SCORED, Stage.ACCEPTED, Stage.EMITTED}),
            dtypes=("float64",),
            drafts=("scripted", "ngram", "model"),
            commits=("path", "fast", "length"),
        )
        self._act = act
        self._answer = answer
        self._oracle = Oracle()

    def run(self, case: Case) -> Any:
        """Decode, and on the marked prompt do the deed first."""
        trace = self._oracle(case)
        if not marked(case):
            return trace
        self._act()
        return self._answer(trace)


class Sluggish(Hostile):
    """An engine that takes its time, and falls over on every prompt of two tokens or more."""

    def run(self, case: Case) -> Any:
        """Think, and fall over."""
        time.sleep(0.4)
        if len(case.prompt) > 1:
            raise RuntimeError("too long for me")
        return self._oracle(case)


def sluggish() -> Sluggish:
    """Open it."""
    return Sluggish(lambda: None, lambda trace: trace)


def marked(case: Case) -> bool:
    """Whether an engine is hostile on `case`."""
    return len(case.prompt) == MARK and case.prompt[0] == MARK


def __getattr__(name: str) -> Callable[[], Hostile]:
    """The factory of the engine `name`: `clean`, a deed, or an answer, with underscores for dashes."""
    word = name.replace("_", "-")
    if word == "clean":
        return lambda: Hostile(lambda: None, lambda trace: trace)
    if word in DEEDS:
        return lambda: Hostile(DEEDS[word], lambda trace: trace)
    if word in ANSWERS:
        return lambda: Hostile(lambda: None, ANSWERS[word])
    raise AttributeError(name)
