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

from backends.base import Unavailable
from backends.engine.ranks.member import Facts, Membership, belong, facts_of
from backends.engine.seams import Seams

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
        self._name, self._patience = name, patience
        self._folder = Path(tempfile.mkdtemp(prefix="specverify-ranks-"))
        self._entered: Any = context.RawArray("q", size)
        self._wires: list[Connection] = []
        self._ranks: list[ForkProcess] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            # Three times the patience: the crew is to tell which rank lags before the transport gives up.
            place = str(self._folder / "meeting")
            member = Membership(rank, size, place, 3 * patience, self._entered, seams, transport, facts)
            one = context.Process(target=belong, args=(member, theirs, [*self._wires, ours]), daemon=True)
            one.start()
            theirs.close()
            self._wires.append(ours)
            self._ranks.append(one)
        self._greet()

    @property
    def processes(self) -> list[int]:
        """The id of each rank's process."""
        return [one.pid or 0 for one in self._ranks]

    def _greet(self) -> None:
        hello = [facts for _, facts in self._answers()]
        for rank, facts in enumerate(hello):
            for what in sorted({*facts, *hello[0]}):
                mine, first = facts.get(what, "nothing"), hello[0].get(what, "nothing")
                if mine != first:
                    self._fail(f"rank {rank} has {what} {mine}, and rank 0 has {first}")
        self._tell("join")

    def ask(self, *told: Any) -> list[tuple[str, Any]]:
        """The answers of all ranks to one request, in order.

        Raises:
            Unavailable: A rank died or lags; the crew is then over.
        """
        self._tell(told)
        return self._answers()

    def _tell(self, told: Any) -> None:
        try:
            for wire in self._wires:
                wire.send(told)
        except OSError:
            self._fail(self._dead() or "a rank takes no requests")

    def _answers(self) -> list[tuple[str, Any]]:
        found: dict[int, tuple[str, Any]] = {}
        seen, since = list(self._entered), time.monotonic()
        while len(found) < len(self._wires):
            waiting = {wire: rank for rank, wire in enumerate(self._wires) if rank not in found}
            for ready in wait(list(waiting), timeout=min(1.0, self._patience)):
                assert isinstance(ready, Connection)
                try:
                    found[waiting[ready]] = ready.recv()
                except (EOFError, OSError):
                    self._fail(self._dead() or f"rank {waiting[ready]} has closed its wire")
                since = time.monotonic()
            if seen != list(self._entered):
                seen, since = list(self._entered), time.monotonic()
            if time.monotonic() - since > self._patience:
                late = min((rank for rank in range(len(self._wires)) if rank not in found), key=seen.__getitem__)
                self._fail(
                    f"rank {late} lags: it has entered {seen[late]} collectives, and the furthest {max(seen)}; "
                    f"nothing has moved for {self._patience:g} seconds"
                )
        lost = next((rank for rank, (word, _) in sorted(found.items()) if word == "lost"), None)
        if lost is not None:
            self._fail(self._dead() or f"rank {lost} has lost the others: {found[lost][1]}")
        return [found[rank] for rank in range(len(self._wires))]

    def _dead(self) -> str | None:
        """The first rank that has died, in words."""
        until = time.monotonic() + GRACE
        while time.monotonic() < until:
            for rank, one in enumerate(self._ranks):
                if not one.is_alive():
                    code = one.exitcode or 0
                    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
                    return f"rank {rank} died: its process {how}"
            time.sleep(0.02)
        return None

    def _fail(self, why: str) -> None:
        self.close()
        raise Unavailable(f"{self._name}: {why}")

    def close(self) -> None:
        """End all ranks."""
        for one in self._ranks:
            one.kill()
        for one in self._ranks:
            one.join()
        for wire in self._wires:
            wire.close()
        shutil.rmtree(self._folder, ignore_errors=True)
