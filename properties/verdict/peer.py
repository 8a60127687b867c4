"""The peer: a reference that shows tokens alone, as invariants see it.

No oracle runs. The reference decodes the requests of the cases by itself, without their drafts and layouts.
"""

from collections.abc import Callable
from dataclasses import replace

from specverify.properties.verdict.invariant import NoReference
from specverify.properties.verdict.subject import NoTrace, Refusal, Subject
from specverify.reference.abilities import SOFT_CAPS, Abilities
from specverify.reference.case import Case
from specverify.reference.layout import KvLayout
from specverify.reference.sampling import Stops
from specverify.reference.trace import Trace


class Peer:
    """A backend in the oracle's place that shows what it emits, and of the other stages too little for an oracle."""

    def __init__(self, backend: Subject, abilities: Abilities) -> None:
        self.name = backend.name
        self.abilities = abilities
        self._backend = backend
        self._refusals: dict[Case, str] = {}

    def __call__(self, case: Case) -> Trace:
        """The reference's trace of the case's request, decoded plainly.

        Raises:
            NoReference: The reference declines the request or breaks on it, or did not repeat its own output.
        """
        if case in self._refusals:
            raise NoReference(self._refusals[case])
        return self._trace(lambda: self._backend(self._plain(case)))

    def run_again(self, case: Case, time: int = 1) -> Trace:
        """The trace of another run of the same request, remembered under the number `time`."""
        return self._trace(lambda: self._backend.run_again(self._plain(case), time))

    def waver(self, case: Case) -> None:
        """Record that the reference gave two outputs for one request, and refuse to answer for it.

        Raises:
            NoReference: Always.
        """
        self._refusals[case] = f"the reference {self.name} gave another output when asked again: it is nondeterministic"
        raise NoReference(self._refusals[case])

    def token_after(self, case: Case, tokens: tuple[int, ...], seed: int | None = None) -> int:
        """The one token that the reference decodes after the prompt and the tokens `tokens`.

        It is drawn on the coins of `seed`, or decoded greedily without a seed.

        Raises:
            NoReference: The reference gave no token or several, declined the request, or broke on it.
        """
        sampling = replace(case.sampling, temperature=0.0, tape=(), seed=0)
        if seed is not None:
            sampling = replace(case.sampling, tape=(), seed=seed)
        short = replace(self._plain(case), prompt=case.prompt + tokens, sampling=sampling, stops=Stops(1))
        # Asked anew each time: requests differ in seed and text, and memory of them would be of no use.
        outcome = self._backend.run_fresh(short)
        if not isinstance(outcome, Trace):
            raise self._no_answer(outcome.why, isinstance(outcome, Refusal))
        if len(outcome.output) != 1:
            raise NoReference(f"the reference {self.name} gave {len(outcome.output)} tokens where 1 was asked for")
        return outcome.output[0]

    def _plain(self, case: Case) -> Case:
        """The request as the reference takes it: without draft, tape and layout."""
        abilities = self.abilities
        layout = KvLayout() if "branch" in abilities.layouts else replace(KvLayout(), kind=abilities.layouts[0])
        plain = replace(case.plain_decode(), layout=layout)
        if not case.sampling.greedy:
            plain = replace(plain, sampling=replace(case.sampling, tape=()))
        return plain

    def _trace(self, ask: Callable[[], Trace]) -> Trace:
        try:
            return ask()
        except NoTrace as no_trace:
            raise self._no_answer(no_trace.outcome.why, isinstance(no_trace.outcome, Refusal)) from no_trace

    def _no_answer(self, why: str, declined: bool) -> NoReference:
        return NoReference(f"the reference {self.name} {'declines' if declined else 'breaks on'} it: {why}")


def shared_abilities(engine: Abilities, reference: Abilities) -> Abilities:
    """The abilities within which both sides can be asked one request; drafts and layouts are the engine's alone."""
    dtypes = tuple(dtype for dtype in engine.dtypes if dtype in reference.dtypes)
    families = engine.families
    if reference.families is not None:
        families = tuple(family for family in families or reference.families if family in reference.families)
    # A model without a window is taken by all.
    windows = (engine.least_window, reference.least_window)
    lengths = [length for length in (engine.longest, reference.longest) if length]
    return replace(
        engine,
        dtypes=dtypes or engine.dtypes,
        max_temperature=min(engine.max_temperature, reference.max_temperature),
        processes=tuple(process for process in engine.processed if process in reference.processed),
        stops=tuple(stop for stop in engine.stops if stop in reference.stops),
        families=families,
        soft_caps=max(engine.soft_caps, reference.soft_caps, key=SOFT_CAPS.index),
        sinks=engine.sinks and reference.sinks,
        indexed=engine.indexed and reference.indexed,
        unequal_widths=engine.unequal_widths and reference.unequal_widths,
        least_window=max(windows) if all(windows) else 0,
        longest=min(lengths, default=0),
        least_prompt=max(engine.least_prompt, reference.least_prompt),
    )
