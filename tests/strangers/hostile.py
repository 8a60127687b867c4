"""Hostile engines for tests: each decodes with the oracle, and on one prompt does something that no engine should."""

import contextlib
import ctypes
import faulthandler
import gc
import os
import random
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any

import numpy as np

from specverify.backends.base import Declaration
from specverify.reference.case import Case
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.trace import Stage, Trace

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
    arrays = []
    while True:
        arrays.append(np.ones(8 << 20))


def takes_at_once() -> None:
    """Take too much memory in one piece, and hold it for a while."""
    array = np.ones(1 << 28)
    time.sleep(2)
    del array


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

        arguments = [getattr(torch, value[6:]) if str(value).startswith("dtype:") else value for value in values]
        attrgetter(name)(torch)(*arguments)

    return act


def shrinks_limits() -> None:
    """Allow this process no file of any size."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    with open("/dev/shm/hostile-engine" if os.path.isdir("/dev/shm") else "hostile-engine", "w") as file:
        file.write("x")


def enters_autocast() -> None:
    """Leave torch casting by itself."""
    import torch

    torch.set_autocast_enabled("cpu", True)


def enters_a_mode() -> None:
    """Leave a mode before every call of torch."""
    from contextlib import ExitStack

    from torch.overrides import BaseTorchFunctionMode

    ExitStack().enter_context(BaseTorchFunctionMode())


def replaces(owner: str, name: str) -> Callable[[], None]:
    """Put a function of its own in the place of `name` of the module or class of torch `owner`."""

    def act() -> None:
        import torch

        target: Any = torch
        for word in owner.split(".")[1:]:
            target = getattr(target, word)
        setattr(target, name, lambda *_, **__: None)

    return act


def replaces_attention() -> None:
    """Put a function of its own in the place of one of transformers' attention functions."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS["sdpa"] = replaces_attention


def seeds_torch() -> None:
    """Seed torch's global generator with the number that every case gets."""
    import torch

    torch.manual_seed(7)


def draws_of_torch() -> None:
    """Draw from torch's global generator."""
    import torch

    torch.rand(3)


def sleeper() -> threading.Thread:
    """A thread that sleeps."""
    thread = threading.Thread(target=time.sleep, args=(600,), daemon=True)
    thread.start()
    return thread


def parent_of(pid: int) -> int:
    """The id of the parent of process `pid`."""
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def to_ancestor(generations: int, name: str) -> Callable[[], None]:
    """Send the signal `name` to the process's parent (1), to the parent's parent (2), and so on."""

    def act() -> None:
        pid = os.getpid()
        for _ in range(generations):
            pid = parent_of(pid)
        os.kill(pid, getattr(signal, name))

    return act


def stops_keeper_for_good() -> None:
    """Leave a daemon that stops the keeper again and again."""
    keeper = os.getppid()
    os.kill(keeper, signal.SIGSTOP)  # the daemon may start only after the run
    if os.fork() == 0:
        os.setsid()
        while True:
            os.kill(keeper, signal.SIGSTOP)
            time.sleep(0.001)


def kills_keeper_and_leaves() -> None:
    """Leave a program running in a session of its own, and kill the keeper."""
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def outlives_its_keeper() -> None:
    """Ask the kernel not to be ended with the keeper, and kill that."""
    ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(0.2)


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
    "autocast": enters_autocast,
    "mode": enters_a_mode,
    "kernels": torch_state("backends.cuda.enable_flash_sdp", False),
    "alarm-later": lambda: signal.alarm(500),
    "warnings-raise": lambda: warnings.simplefilter("error", FutureWarning),
    "softmax-replaced": replaces("torch", "softmax"),
    "attention-replaced": replaces("torch.nn.functional", "scaled_dot_product_attention"),
    "method-replaced": replaces("torch.Tensor", "argmax"),
    "method-hidden": replaces("torch.nn.Linear", "__call__"),
    "registry": replaces_attention,
    "keeper-stopped": to_ancestor(1, "SIGSTOP"),
    "keeper-killed": to_ancestor(1, "SIGKILL"),
    "keeper-stopped-for-good": stops_keeper_for_good,
    "keeper-killed-and-left": kills_keeper_and_leaves,
    "keeper-outlived": outlives_its_keeper,
}
"""What each does on the marked prompt; most then decode as if nothing had happened."""

LEAVINGS: dict[str, Callable[[], object]] = {
    "environment": lambda: os.environ.update(HOSTILE_ENGINE="was-here"),
    "filters": lambda: warnings.simplefilter("ignore", FutureWarning),
    "import-path": lambda: sys.path.append("/nowhere"),
    "recursion-limit": lambda: sys.setrecursionlimit(5000),
    "garbage": gc.disable,
    "torch-drawn": draws_of_torch,
    "torch-seeded": seeds_torch,
    "numpy-drawn": lambda: np.random.rand(3),  # noqa: NPY002 - the global generator is meant
    "python-drawn": lambda: random.random(),
    "handler": lambda: signal.signal(signal.SIGTERM, lambda *_: None),
    "program": lambda: subprocess.Popen(["sleep", "600"]),
    "program-of-a-shell": lambda: os.system("sleep 600 &"),
    "ancestor-killed": to_ancestor(2, "SIGKILL"),
    "ancestor-stopped": to_ancestor(2, "SIGSTOP"),
}
"""What some leave behind on the marked prompt that by itself changes no answer of a later case."""

ANSWERS: dict[str, Callable[[Trace], object]] = {
    "nothing": lambda trace: None,
    "tokens": lambda trace: list(trace.output),
    "a-dict": vars,
    "a-generator": lambda trace: (step for step in trace.steps),
    "the-class": lambda trace: Trace,
    "words": str,
}
"""What some return in place of a trace."""

HOARD: list[object] = []
"""What engines that leak hold."""


def starts_a_pool() -> None:
    """Start four threads, unless they are there."""
    if not HOARD:
        HOARD.extend(sleeper() for _ in range(4))


LEAKS: dict[str, Callable[[], object]] = {
    "leaking-threads": sleeper,
    "leaking-memory": lambda: HOARD.append(np.ones(2 << 20)),
    "leaking-files": lambda: HOARD.append(open(os.devnull)),  # noqa: SIM115
    "leaking-programs": lambda: HOARD.append(subprocess.Popen(["sleep", "600"])),
    "leaking-environment": lambda: os.environ.update(HOSTILE_ENGINE=str(time.monotonic())),
    "pooled-threads": starts_a_pool,
}
"""What some do in every case: each leaves a little more behind, but for the last one, which makes a pool once."""


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


class Leaking(Hostile):
    """An engine that does its deed in every case."""

    def run(self, case: Case) -> Any:
        """Do it, and decode."""
        self._act()
        return self._oracle(case)


def on_a_device_of_its_own() -> Hostile:
    """An engine that declares cuda, whatever torch sees: it may compute there in processes of its own."""
    engine = Hostile(lambda: None, lambda trace: trace)
    engine.declaration = replace(engine.declaration, device="cuda")
    return engine


class Unnamed(Hostile):
    """An engine whose facts cannot be told once it is open."""

    @property
    def mode(self) -> str:
        """Fail."""
        raise RuntimeError("no mode\nat all")


def unnamed() -> Unnamed:
    """Open it."""
    return Unnamed(lambda: None, lambda trace: trace)


def marked(case: Case) -> bool:
    """Whether an engine is hostile on `case`."""
    return len(case.prompt) == MARK and case.prompt[0] == MARK


def __getattr__(name: str) -> Callable[[], Hostile]:
    """The factory of the engine `name`: `clean`, a deed, a leaving, or an answer, with underscores for dashes."""
    word = name.replace("_", "-")
    if word == "clean":
        return lambda: Hostile(lambda: None, lambda trace: trace)
    if word in DEEDS:
        return lambda: Hostile(DEEDS[word], lambda trace: trace)
    if word in LEAVINGS:
        return lambda: Hostile(LEAVINGS[word], lambda trace: trace)
    if word in LEAKS:
        return lambda: Leaking(LEAKS[word], lambda trace: trace)
    if word in ANSWERS:
        return lambda: Hostile(lambda: None, ANSWERS[word])
    raise AttributeError(name)
