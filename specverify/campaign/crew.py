"""The crew: the worker processes of a campaign, a connection to each, and their deaths.

Each worker has a connection of its own and shares no lock with another, so that a worker which is killed in the middle
of a sentence garbles nobody else's.
"""

import multiprocessing as mp
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from specverify.campaign.messages import STOP, Died
from specverify.campaign.threads import ForWorkers
from specverify.campaign.worker_entry import begin, packed
from specverify.plan import Plan

JOIN_S = 2.0
"""Seconds that a worker which has said all gets to end, before it is killed."""


@dataclass
class _Hand:
    """One worker: its part of the plan, its process, and our end of its connection."""

    plan: Plan
    process: Any
    connection: Any
    talks: bool = True


class Crew:
    """The workers of `plan`; `deadline` is the monotonic clock after which none begins a case."""

    def __init__(self, plan: Plan, deadline: float) -> None:
        self._context = mp.get_context("spawn")
        self._deadline = deadline
        self._threads = ForWorkers((os.cpu_count() or 1) if plan.model else 1)
        self._hands = [self._started(plan.slice(at), frozenset()) for at in range(plan.jobs)]

    def _started(self, plan: Plan, judged: frozenset[str]) -> _Hand:
        mine, its = self._context.Pipe()
        told = packed(plan, self._deadline, judged)
        process = self._context.Process(target=begin, args=(os.getpid(), its, told), daemon=True)
        with self._threads:
            process.start()
        its.close()
        return _Hand(plan, process, mine)

    def news(self, timeout: float) -> Iterator[tuple[int, object]]:
        """Messages that have arrived within `timeout` seconds, with their worker's number; `Died` ends a worker's."""
        talking = {one.connection: at for at, one in enumerate(self._hands) if one.talks}
        for ready in wait(list(talking), timeout):
            assert isinstance(ready, Connection)
            at = talking[ready]
            try:
                yield at, ready.recv()
            except (EOFError, OSError):
                hand = self._hands[at]
                hand.talks = False
                hand.process.join(JOIN_S)
                yield at, Died(_how(hand.process.exitcode))

    def tell(self, word: str, but: int | None = None) -> None:
        """Say `word` to every worker that lives, but for number `but`."""
        for at, hand in enumerate(self._hands):
            if at != but and hand.talks:
                try:
                    hand.connection.send(word)
                except OSError:  # the worker has just died: `news` will say so
                    continue

    def replace(self, at: int, judged: frozenset[str]) -> None:
        """Put a new process in the place of worker `at`, which shall not judge the cases `judged` again."""
        self._hands[at].connection.close()
        self._hands[at] = self._started(self._hands[at].plan, judged)

    def end(self) -> None:
        """End every worker that is left: asked, then killed."""
        self.tell(STOP)
        for hand in self._hands:
            hand.process.join(JOIN_S)
            if hand.process.is_alive():
                hand.process.kill()
                hand.process.join(JOIN_S)
            hand.connection.close()


def _how(exitcode: int | None) -> str:
    if exitcode is None:
        return "closed its connection"
    if exitcode >= 0:
        return f"exit code {exitcode}"
    try:
        return f"signal {signal.Signals(-exitcode).name}"
    except ValueError:
        return f"signal {-exitcode}"
