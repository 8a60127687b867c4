"""Children: tasks run each in a fork of this process, some at a time, under limits of time, silence and memory."""

import gc
import multiprocessing as mp
import os
import resource
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any

Work = Callable[[Callable[[str], None]], Any]
"""What a child does: it is given a function to say what it is at, and returns what JSON can hold."""

MEMORY = 6 * 2**30
"""Bytes of address space that a child may take beyond those of its parent."""


class Overrun(BaseException):
    """A child has used the processor for too long without a word; no Exception, so that nobody takes it for one."""


@dataclass
class Child:
    """One that runs."""

    task: Any
    process: ForkProcess
    pipe: Connection
    began: float
    heard: float
    last_word: str = ""


def run(
    tasks: Iterable[tuple[Any, Work]], jobs: int, silence_s: float, stopped: Callable[[], bool]
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Each task with what came of it, as they end: `returned`, or `ended`, and `seconds`.

    `ended` says why there is nothing: `silent` after `silence_s` seconds of processor time without a word (six times
    that by the clock), `broke: ...` with what was raised, or `died`, with the last word in `said`. No further task
    begins once `stopped` says so.
    """
    waiting = iter(tasks)
    running: list[Child] = []
    more = True
    try:
        while more or running:
            while more and len(running) < jobs:
                task = None if stopped() else next(waiting, None)
                more = task is not None
                if task is not None:
                    running.append(_begin(*task, silence_s))
            wait([child.pipe for child in running], timeout=1.0)
            for child in list(running):
                outcome = _heard(child, silence_s)
                if outcome is not None:
                    running.remove(child)
                    child.process.join()
                    yield child.task, {**outcome, "seconds": round(time.monotonic() - child.began, 2)}
    finally:
        for child in running:
            child.process.kill()
            child.process.join()


def _begin(task: Any, work: Work, silence_s: float) -> Child:
    reading_end, writing_end = mp.Pipe(duplex=False)
    process = mp.get_context("fork").Process(target=_child, args=(work, writing_end, silence_s), daemon=True)
    process.start()
    writing_end.close()
    now = time.monotonic()
    return Child(task, process, reading_end, now, now)


def _heard(child: Child, silence_s: float) -> dict[str, Any] | None:
    """What the child came to, or None while it goes on."""
    while child.pipe.poll():
        try:
            kind, content = child.pipe.recv()
        except EOFError:
            return {"ended": "died", "said": child.last_word}
        child.heard = time.monotonic()
        if kind == "said":
            child.last_word = content
        else:
            return {kind: content} if kind == "returned" else {"ended": content, "said": child.last_word}
    if time.monotonic() - child.heard > 6 * silence_s:
        child.process.kill()
        return {"ended": "silent", "said": child.last_word}
    return None


def _child(work: Work, pipe: Connection, silence_s: float) -> None:
    gc.freeze()  # what the parent made need not be looked through again, which would copy it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    with open("/proc/self/statm") as numbers:
        resident_bytes = int(numbers.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (resident_bytes + MEMORY, resident_bytes + MEMORY))

    def overrun(*_: object) -> None:
        raise Overrun

    def tell(word: str) -> None:
        signal.setitimer(signal.ITIMER_PROF, silence_s)
        pipe.send(("said", word))

    signal.signal(signal.SIGPROF, overrun)
    tell("")
    try:
        message = ("returned", work(tell))
    except Overrun:
        message = ("ended", "silent")
    except Exception as why:  # whatever it was, the parent says it
        message = ("ended", f"broke: {type(why).__name__}: {why}")
    signal.setitimer(signal.ITIMER_PROF, 0)
    pipe.send(message)
    pipe.close()
    os._exit(0)
