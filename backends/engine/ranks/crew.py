"""Crew: the processes of all ranks, as the engine that asks them sees them.

A rank that dies, lags, or has other versions or flags than rank 0 ends the run in one line with its number; no rank is
waited for without a limit.
"""

import multiprocessing
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from specverify.backends.base import Unavailable
from specverify.backends.engine.ranks.member import Facts, Membership, facts_of, run_rank
from specverify.backends.engine.seams import Seams

PATIENCE = 60.0
"""Seconds without a collective, or an answer, of any rank after which a rank lags."""

GRACE = 2.0
"""Seconds in which the death of a process shows after another rank has lost it."""


class Crew:
    """The processes of `size` ranks.

    Raises:
        Unavailable: This system cannot fork, or the ranks differ in versions or flags.
    """

    def __init__(
        self,
        size: int,
        seams: Seams,
        name: str,
        patience: float = PATIENCE,
        transport: str = "gloo",
        facts: Callable[[int], Facts] = facts_of,
    ) -> None:
        if sys.platform != "linux":
            raise Unavailable(f"{name} forks its ranks, which is known to be safe on Linux alone")
        context = multiprocessing.get_context("fork")
        self._name = name
        self._patience = patience
        self._folder = Path(tempfile.mkdtemp(prefix="specverify-ranks-"))
        self._entered: Any = context.RawArray("q", size)
        self._wires: list[Connection] = []
        self._ranks: list[ForkProcess] = []
        for rank in range(size):
            crew_end, rank_end = context.Pipe()
            # Three times the patience: the crew is to tell which rank lags before the transport gives up.
            place = str(self._folder / "meeting")
            member = Membership(rank, size, place, 3 * patience, self._entered, seams, transport, facts)
            process = context.Process(target=run_rank, args=(member, rank_end, [*self._wires, crew_end]), daemon=True)
            process.start()
            rank_end.close()
            self._wires.append(crew_end)
            self._ranks.append(process)
        self._greet()

    @property
    def processes(self) -> list[int]:
        """The id of each rank's process."""
        return [process.pid or 0 for process in self._ranks]

    def _greet(self) -> None:
        hello = [facts for _, facts in self._answers()]
        for rank, facts in enumerate(hello):
            for name in sorted({*facts, *hello[0]}):
                fact, first_fact = facts.get(name, "nothing"), hello[0].get(name, "nothing")
                if fact != first_fact:
                    self._fail(f"rank {rank} has {name} {fact}, and rank 0 has {first_fact}")
        self._tell("join")

    def ask(self, *request: Any) -> list[tuple[str, Any]]:
        """The answers of all ranks to one request, in order.

        Raises:
            Unavailable: A rank died or lags; the crew is then over.
        """
        self._tell(request)
        return self._answers()

    def _tell(self, message: Any) -> None:
        try:
            for wire in self._wires:
                wire.send(message)
        except OSError:
            self._fail(self._death() or "a rank takes no requests")

    def _answers(self) -> list[tuple[str, Any]]:
        answers: dict[int, tuple[str, Any]] = {}
        calls_entered = list(self._entered)
        since = time.monotonic()
        while len(answers) < len(self._wires):
            ranks_by_wire = {wire: rank for rank, wire in enumerate(self._wires) if rank not in answers}
            for ready in wait(list(ranks_by_wire), timeout=min(1.0, self._patience)):
                assert isinstance(ready, Connection)
                try:
                    answers[ranks_by_wire[ready]] = ready.recv()
                except (EOFError, OSError):
                    self._fail(self._death() or f"rank {ranks_by_wire[ready]} has closed its wire")
                since = time.monotonic()
            if calls_entered != list(self._entered):
                calls_entered = list(self._entered)
                since = time.monotonic()
            if time.monotonic() - since > self._patience:
                late_rank = min(
                    (rank for rank in range(len(self._wires)) if rank not in answers), key=calls_entered.__getitem__
                )
                self._fail(
                    f"rank {late_rank} lags: it has entered {calls_entered[late_rank]} collectives, "
                    f"and the furthest {max(calls_entered)}; "
                    f"nothing has moved for {self._patience:g} seconds"
                )
        lost_rank = next((rank for rank, (word, _) in sorted(answers.items()) if word == "lost"), None)
        if lost_rank is not None:
            self._fail(self._death() or f"rank {lost_rank} has lost the others: {answers[lost_rank][1]}")
        return [answers[rank] for rank in range(len(self._wires))]

    def _death(self) -> str | None:
        """The first rank that has died, in words."""
        until = time.monotonic() + GRACE
        while time.monotonic() < until:
            for rank, process in enumerate(self._ranks):
                if not process.is_alive():
                    code = process.exitcode or 0
                    death = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
                    return f"rank {rank} died: its process {death}"
            time.sleep(0.02)
        return None

    def _fail(self, reason: str) -> None:
        self.close()
        raise Unavailable(f"{self._name}: {reason}")

    def close(self) -> None:
        """End all ranks."""
        for process in self._ranks:
            process.kill()
        for process in self._ranks:
            process.join()
        for wire in self._wires:
            wire.close()
        shutil.rmtree(self._folder, ignore_errors=True)
