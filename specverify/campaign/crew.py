"""The crew: the worker processes of a campaign, and a connection to each.

Each worker has a connection of its own and shares no lock with another worker. A worker that is killed in the middle of
a message cannot garble another worker's messages.
"""

import multiprocessing as mp
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from specverify.campaign.messages import STOP, Died
from specverify.campaign.threads import for_workers
from specverify.campaign.worker_entry import begin, pack_order
from specverify.isolation import ancestor
from specverify.isolation.handle import Handle
from specverify.isolation.proc import STOPPED
from specverify.isolation.usable_cores import usable_cores
from specverify.plan import Plan
from specverify.properties.tally import Failure
from specverify.reference.case import Case

JOIN_S = 2.0
"""Seconds in which a worker must end after its last message; then it is killed."""

LOOK_S, STOPPED_LOOKS = 0.2, 10
"""Least seconds between two looks at a worker, and the looks in a row at which it is stopped before it is killed.

Looks and not seconds: a run that is suspended as a whole stands still too.
"""


@dataclass
class Place:
    """The campaign's record of one worker's place, which a replacement inherits.

    Attributes:
        case: The case that the worker is judging, or None.
        judged: Ids of the cases that were judged in this place, or given up, each as often as it was.
        failures: Failures found in this place; the last one may still be as drawn.
        provisional: Whether the last of `failures` is still being shrunk.
        deaths: Number of workers that died in this place.
        over: Whether the place has come to its end.
        exhausted: Whether there were no more new cases to draw.
    """

    case: Case | None = None
    judged: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    provisional: bool = False
    deaths: int = 0
    over: bool = False
    exhausted: bool = False


class AnyCrew(Protocol):
    """The workers of a campaign."""

    def messages(self, timeout: float) -> Iterator[tuple[int, object]]:
        """Messages that arrive within `timeout` seconds, each with the number of its worker's place."""

    def tell(self, word: str) -> None:
        """Give every worker an order."""

    def replace(self, number: int, judged: tuple[str, ...]) -> None:
        """Start a new worker at place `number`, which passes over the cases `judged`."""

    def end(self) -> None:
        """End every worker."""


@dataclass
class _Hand:
    """One worker: its part of the plan, its process, and our end of its connection."""

    plan: Plan
    process: Any
    connection: Any
    handle: Handle
    talks: bool = True
    stopped_looks: int = 0


class Crew:
    """The workers of `plan`; no worker begins a case after the time `deadline` of the monotonic clock.

    Each worker passes over the cases `judged`, each as often as it stands there.
    """

    def __init__(self, plan: Plan, deadline: float, judged: tuple[str, ...] = ()) -> None:
        # Spawned, not forked: a fresh process reads the thread settings of `for_workers` when it imports NumPy.
        self._context = mp.get_context("spawn")
        self._deadline = deadline
        self._threads = plan.threads or (usable_cores() if plan.model else 1)
        with for_workers(self._threads):
            self._ancestor = ancestor.start_ancestor()
        self._next_look = 0.0
        self._hands = [self._start_worker(plan.slice(number), judged) for number in range(plan.jobs)]

    def _start_worker(self, plan: Plan, judged: tuple[str, ...]) -> _Hand:
        campaign_end, worker_end = self._context.Pipe()
        order = pack_order(plan, self._deadline, judged)
        keeper = None if self._ancestor is None else self._ancestor.keeper()
        process = self._context.Process(target=begin, args=(os.getpid(), worker_end, order, keeper), daemon=True)
        with for_workers(self._threads):
            process.start()
        # Only the worker holds its ends now: its death closes both connections, which `messages` and its keeper see.
        worker_end.close()
        if keeper is not None:
            keeper.close()
        assert process.pid is not None
        return _Hand(plan, process, campaign_end, Handle(process.pid))

    def messages(self, timeout: float) -> Iterator[tuple[int, object]]:
        """Messages that arrive within `timeout` seconds, each with its worker's number; the last one may be `Died`."""
        self._kill_stopped()
        talking = {hand.connection: number for number, hand in enumerate(self._hands) if hand.talks}
        for ready in wait(list(talking), timeout):
            assert isinstance(ready, Connection)
            number = talking[ready]
            try:
                yield number, ready.recv()
            except (EOFError, OSError):
                hand = self._hands[number]
                hand.talks = False
                # The exit code of a process that has just ended is known only after `join`.
                hand.process.join(JOIN_S)
                stopped = ", since it was stopped (SIGSTOP)" if hand.stopped_looks >= STOPPED_LOOKS else ""
                yield number, Died(f"{_how(hand.process.exitcode)}{stopped}")

    def _kill_stopped(self) -> None:
        """Kill every worker that a signal has stopped, such as one of its engine's: it would never answer."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LOOK_S
        for hand in self._hands:
            if hand.talks:
                hand.stopped_looks = hand.stopped_looks + 1 if hand.handle.state() == STOPPED else 0
                if hand.stopped_looks >= STOPPED_LOOKS:
                    hand.process.kill()

    def tell(self, word: str, except_number: int | None = None) -> None:
        """Send the order `word` to every living worker except number `except_number`."""
        for number, hand in enumerate(self._hands):
            if number != except_number and hand.talks:
                try:
                    hand.connection.send(word)
                except OSError:  # the worker has just died: `messages` will say so
                    continue

    def replace(self, number: int, judged: tuple[str, ...]) -> None:
        """Start a new process in the place of worker `number`; it does not judge the cases `judged` again."""
        self._hands[number].connection.close()
        self._hands[number].handle.close()
        self._hands[number] = self._start_worker(self._hands[number].plan, judged)

    def end(self) -> None:
        """End every remaining worker, first by the order STOP, then by a signal."""
        self.tell(STOP)
        for hand in self._hands:
            hand.process.join(JOIN_S)
            if hand.process.is_alive():
                hand.process.kill()
                hand.process.join(JOIN_S)
            hand.connection.close()
            hand.handle.close()
        if self._ancestor is not None:
            self._ancestor.end()


def _how(exitcode: int | None) -> str:
    if exitcode is None:
        return "closed its connection"
    if exitcode >= 0:
        return f"exit code {exitcode}"
    try:
        return f"signal {signal.Signals(-exitcode).name}"
    except ValueError:
        return f"signal {-exitcode}"
