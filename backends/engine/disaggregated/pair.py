"""Pair: the two processes of a hand-over, as the backend that asks them sees them.

A side that dies or lags ends the case in one line with its name; neither side is waited for without a limit.
"""

import multiprocessing
import shutil
import sys
import tempfile
import time
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from specverify.backends.base import Unavailable
from specverify.backends.engine.disaggregated.decode import decode_side
from specverify.backends.engine.disaggregated.prefill import prefill_side
from specverify.backends.engine.disaggregated.terms import Terms
from specverify.backends.engine.handover.by_gloo import SIDES
from specverify.backends.engine.handover.by_shared_memory import MEMORY
from specverify.backends.engine.seams import Seams
from specverify.reference.case import Case

PATIENCE = 60.0
"""Seconds without a sign of a side after which it lags."""

GRACE = 2.0
"""Seconds in which the death of a process shows after the other side has lost it."""


class SideLost(Exception):
    """A side died or lags, and the pair is over; the message says which."""


class Pair:
    """A prefill side and a decode side.

    Raises:
        Unavailable: This system cannot fork.
    """

    def __init__(self, seams: Seams, name: str, by: str = "shared-memory", patience: float = PATIENCE) -> None:
        if sys.platform != "linux":
            raise Unavailable(f"{name} forks its sides, which is known to be safe on Linux alone")
        context = multiprocessing.get_context("fork")
        memory = MEMORY if MEMORY.is_dir() else None
        self._folder = Path(tempfile.mkdtemp(prefix="specverify-hand-over-", dir=memory))
        self._patience = patience
        self._run = 0
        self._beats: Any = context.RawArray("q", len(SIDES) + 1)
        semaphores = {side: context.Semaphore(0) for side in SIDES}
        terms = Terms(seams, by, self._folder, patience, semaphores, self._beats)
        self._decode_end, decode_end = context.Pipe()
        prefill_end, decode_wire = context.Pipe()
        # A side keeps the writing end of its own life; the other one reads that it is closed.
        lives = {side: context.Pipe(duplex=False) for side in SIDES}
        all_ends = [
            self._decode_end,
            decode_end,
            prefill_end,
            decode_wire,
            *(end for life in lives.values() for end in life),
        ]

        def foreign(*own_ends: Connection) -> list[Connection]:
            return [end for end in all_ends if end not in own_ends]

        (prefill_ends, prefill_lives), (decode_ends, decode_lives) = (lives[side] for side in SIDES)
        prefill = (terms, prefill_end, decode_ends, foreign(prefill_end, decode_ends, prefill_lives))
        decode = (
            terms,
            decode_end,
            decode_wire,
            prefill_ends,
            foreign(decode_end, decode_wire, prefill_ends, decode_lives),
        )
        self._sides: dict[str, ForkProcess] = {
            "prefill": context.Process(target=prefill_side, args=prefill, daemon=True),
            "decode": context.Process(target=decode_side, args=decode, daemon=True),
        }
        for process in self._sides.values():
            process.start()
        for end in foreign(self._decode_end):
            end.close()

    @property
    def processes(self) -> dict[str, int]:
        """The id of each side's process."""
        return {side: process.pid or 0 for side, process in self._sides.items()}

    def ask(self, case: Case) -> tuple[str, Any]:
        """What the decode side tells of `case`: a word, and a trace or the reason of a failure.

        Raises:
            SideLost: A side died or lags.
        """
        self._run += 1
        try:
            self._decode_end.send((self._run, case))
        except OSError:
            self._fail(self._death() or "the decode side takes no requests")
        word, answer = self._answer()
        if word == "lost":
            self._fail(self._death() or answer)
        return word, answer

    def _answer(self) -> tuple[str, Any]:
        beats = list(self._beats)
        since = time.monotonic()
        while True:
            try:
                if wait([self._decode_end], timeout=min(1.0, self._patience)):
                    word, answer = self._decode_end.recv()
                    return word, answer
            except (EOFError, OSError):
                self._fail(self._death() or "the decode side has closed its wire")
            if beats[:-1] != list(self._beats)[:-1]:
                beats = list(self._beats)
                since = time.monotonic()
            # The decode side itself tells that the other one lags; a little more time is for its line to arrive.
            if time.monotonic() - since > self._patience + (GRACE if self._beats[len(SIDES)] else 0):
                late_side = SIDES[0] if self._beats[len(SIDES)] else SIDES[1]
                self._fail(f"the {late_side} side lags: it gave no sign for {self._patience:g} seconds")

    def _death(self) -> str | None:
        """The side that has died, in words; a side that has ended well followed the other one."""
        until = time.monotonic() + GRACE
        while time.monotonic() < until:
            for side, process in self._sides.items():
                code = process.exitcode
                if code:
                    death = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
                    return f"the {side} side died: its process {death}"
            time.sleep(0.02)
        return next(
            (f"the {side} side has ended" for side, process in self._sides.items() if not process.is_alive()), None
        )

    def _fail(self, reason: str) -> None:
        self.close()
        raise SideLost(reason)

    def close(self) -> None:
        """End both sides."""
        for process in self._sides.values():
            process.kill()
        for process in self._sides.values():
            process.join()
        self._decode_end.close()
        shutil.rmtree(self._folder, ignore_errors=True)
