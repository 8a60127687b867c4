"""Requests that tell mistakes of an adapter apart: a failing case with other prompts and endings."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from specverify.properties.adapter_mistakes import Sample, Tokens, mistake_in
from specverify.properties.verdict.finding import FINISHED, Finding
from specverify.properties.verdict.invariant import NoReference, Oracle
from specverify.properties.verdict.subject import NoTrace, Subject
from specverify.reference.architecture import Checkpoint, Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.malformed import Malformed
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.trace import Stage

SHAPES = ((3, 6), (5, 8), (2, 7), (6, 9), (4, 3), (1, 7), (3, 1))
"""Tokens of a witness's prompt, and most tokens of its output."""

PROMPTS = 2
"""Prompts that are tried for a shape: the text with most different tokens tells most."""

LEAST_WITNESSES = 4
"""Fewest samples from which a mistake may be named."""

MOST_SPECIALS = 64
"""Most token ids that are tried as an added one."""

TELLING_TEMPERATURE = 1.5
"""The least temperature of witnesses that draw: a colder law draws its greedy text by itself."""


def mistake_of(case: Case, finding: Finding, oracle: Oracle, subject: Subject, until: float) -> str | None:
    """The mistake of an adapter that explains the texts of `case` and of its witnesses, by its name; else None.

    Only texts of requests that run alone are explained. After `until` on the monotonic clock no request begins beyond
    the least number from which a mistake may be named.
    """
    broke = finding.expected == FINISHED
    if broke or finding.stage is not Stage.EMITTED or case.session is not None or case.model.images:
        return None
    samples = list(Witnesses(case, oracle, subject, until).samples())
    return mistake_in(samples, not case.sampling.greedy) if len(samples) >= LEAST_WITNESSES else None


@dataclass
class Witnesses:
    """The samples of one failing case.

    Attributes:
        case: The failing case.
        oracle: The reference.
        subject: The backend.
        until: The time on the monotonic clock after which no request begins beyond the least number.
    """

    case: Case
    oracle: Oracle
    subject: Subject
    until: float

    def samples(self) -> Iterator[Sample]:
        """A sample for the failing case, and for each witness that backend and reference take."""
        count = 0
        for case in self._cases():
            # Fewer samples than the least would be of no use, however slow the machine is.
            if count >= LEAST_WITNESSES and time.monotonic() > self.until:
                return
            sample = self._sample(case)
            if sample is not None:
                count += 1
                yield sample

    def _cases(self) -> Iterator[Case]:
        """The failing case, if it is greedy; then the witnesses, every second one with an ending inside its text."""
        if self.case.sampling.greedy and not self.case.sampling.processes and not self.case.steps:
            yield self.case
        random = np.random.default_rng(int(self.case.id, 16) % 2**32)
        least = 1 if self.subject.abilities is None else self.subject.abilities.least_prompt
        for number, (length, most) in enumerate(SHAPES):
            witness = self._most_telling(random, max(length, least), most)
            if witness is None:
                continue
            ending = self._with_ending(witness) if number % 2 else None
            yield ending or witness

    def _most_telling(self, random: np.random.Generator, length: int, most: int) -> Case | None:
        """Of a few random prompts, the one whose text has most different tokens; None where the model takes none."""
        best: tuple[int, Case] | None = None
        for _ in range(PROMPTS if isinstance(self.case.model, Seeded) else 1):
            prompt = tuple(int(token) for token in random.integers(0, self.case.model.vocab_size, length))
            try:
                case = replace(
                    self.case,
                    prompt=prompt,
                    sampling=self._sampling(),
                    stops=Stops(most),
                    steps=0,
                    session=None,
                    layout=replace(self.case.layout, pages=()),
                )
            except Malformed:
                continue
            text = self._target(case)
            if text is not None and (best is None or len({*text}) > best[0]):
                best = len({*text}), case
        return None if best is None else best[1]

    def _sampling(self) -> Sampling:
        """Greedy decoding; for a case that draws, its temperature and no processing."""
        if self.case.sampling.greedy:
            return Sampling()
        abilities = self.subject.abilities
        hottest = float("inf") if abilities is None else abilities.max_temperature
        temperature = min(max(self.case.sampling.temperature, TELLING_TEMPERATURE), hottest)
        return replace(Sampling(), temperature=temperature, rule=self.case.sampling.rule, seed=1)

    def _with_ending(self, case: Case) -> Case | None:
        """The same request with an ending token inside its text; None where the backend or the text has none."""
        abilities = self.subject.abilities
        text = self._target(case) or ()
        positions = [position for position in range(1, len(text) - 2) if text[position] not in text[:position]]
        if not positions or (abilities is not None and "eos" not in abilities.stops):
            return None
        return replace(case, stops=replace(case.stops, eos=(text[positions[0]],)))

    def _sample(self, case: Case) -> Sample | None:
        """The sample of one request; None where backend or reference has no answer."""
        observed, must_be = self._observed(case), self._target(case)
        if observed is None or must_be is None:
            return None
        again = replace(case, sampling=replace(case.sampling, seed=case.sampling.seed + 1))
        return Sample(
            prompt=case.prompt,
            most=case.stops.room(len(case.prompt)),
            ends=(*case.stops.eos, *case.stops.stop_tokens),
            must_be=must_be,
            observed=observed,
            target=lambda **changes: self._target(case, **changes),
            other=lambda: self._observed(again),
            draws=not case.sampling.greedy,
            draft=lambda: self._draft_text(case),
            specials=self._specials(case),
        )

    def _observed(self, case: Case) -> Tokens | None:
        if self.subject.declines(case) is not None:
            return None
        try:
            return tuple(self.subject(case).output)
        except NoTrace:
            return None

    def _target(
        self, case: Case, prompt: Tokens | None = None, most: int = 0, ends: Tokens | None = None
    ) -> Tokens | None:
        """The target's greedy text, of `case` or with these changes."""
        stops = case.stops if ends is None else Stops(case.stops.max_new_tokens)
        try:
            asked_case = replace(
                case.plain_decode(),
                prompt=case.prompt if prompt is None else prompt,
                sampling=Sampling(),
                stops=replace(stops, max_new_tokens=most or stops.max_new_tokens),
            )
            return tuple(self.oracle(asked_case).output)
        except (Malformed, NoReference, NoTrace):
            return None

    def _draft_text(self, case: Case) -> Tokens | None:
        model = case.draft.model
        return None if model is None else self._target(replace(case, model=model, draft=Scripted()))

    def _specials(self, case: Case) -> Tokens:
        """Ids that a tokenizer may have added: all of a small vocabulary; those of a checkpoint cost a run each."""
        if isinstance(case.model, Checkpoint):
            return (0, 1, 2)
        return tuple(range(min(case.model.vocab_size, MOST_SPECIALS)))
