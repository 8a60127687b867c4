"""The engine with prefill in one process and decode in another, as a backend."""

from dataclasses import replace
from typing import Any

from specverify.backends.base import ProgramFailure, Unavailable
from specverify.backends.devices import too_few_devices
from specverify.backends.engine.backend import EngineBackend
from specverify.backends.engine.disaggregated.pair import Pair, SideLost
from specverify.backends.engine.disaggregated.terms import DEVICES, FAILURES
from specverify.backends.engine.handover.by_gloo import SIDES
from specverify.backends.engine.seams import Seams
from specverify.backends.engine.two_modes import in_mode
from specverify.backends.flags import hand_over_by
from specverify.reference.case import Case
from specverify.reference.trace import Trace

TRIES = 3
"""How often a case is begun before the death of a side ends it."""


class HandedOverBackend(EngineBackend):
    """The engine whose requests are prefilled in one process and go on in another.

    A case whose side dies is done again from its beginning, in two new processes. A live session, which is played
    action by action, stays in one process.
    """

    mixes_prefill = False  # the process that prefills takes no steps
    copies_prefills = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # No packet carries the log-probabilities of a prompt from the side that prefills to the side that decodes.
        self.declaration = replace(self.declaration, prompt_logprobs=False)
        self._by = hand_over_by()
        self._pair: tuple[Seams, Pair] | None = None

    def run(self, case: Case) -> Trace:
        """See `specverify.backends.base.Backend.run`.

        Raises:
            Unavailable: The processes cannot be started.
            ProgramFailure: A side died or lags, as often as the case was begun.
        """
        self._refuse_dtype(case)
        for attempt in range(TRIES):
            try:
                word, answer = self.pair.ask(case)
            except SideLost as why:
                self._pair = None
                if attempt == TRIES - 1:
                    raise ProgramFailure(f"{self.declaration.name}: {why}; the case was begun {TRIES} times") from why
                continue
            if word in FAILURES:
                raise FAILURES[word](answer)
            trace: Trace = answer
            return trace
        raise AssertionError("a case is answered, failed or lost")

    @property
    def pair(self) -> Pair:
        """The two processes; others where a fault was planted since."""
        if self._pair is None or self._pair[0] is not self.seams:
            self.close()
            seams = in_mode(self.seams, self.mode)
            name = self.declaration.name
            by = self._by
            device = DEVICES[by]
            why = None if device == "cpu" else too_few_devices(device, len(SIDES))
            if why is not None:
                hint = "take gloo or shared-memory"
                raise Unavailable(f"{name}: SPECVERIFY_HAND_OVER={by} needs a device for each side: {why}; {hint}")
            self._pair = (self.seams, Pair(seams, name, by))
        return self._pair[1]

    @property
    def processes(self) -> tuple[int, ...]:
        """See `specverify.backends.base.Keeping`."""
        return () if self._pair is None else tuple(self._pair[1].processes.values())

    def close(self) -> None:
        """End both processes."""
        if self._pair is not None:
            self._pair[1].close()
        self._pair = None
