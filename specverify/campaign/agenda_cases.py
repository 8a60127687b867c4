"""The cases of one worker's part of an agenda, each with the invariants to ask."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from specverify.agenda import Agenda
from specverify.campaign.case_stream import Stream
from specverify.campaign.messages import Passed
from specverify.checkpoints.cases import JudgedCase
from specverify.plan import Plan, drawing_seed
from specverify.properties.verdict.invariant import Invariant, taking_turns
from specverify.properties.verdict.subject import Subject
from specverify.reference.abilities import Abilities
from specverify.reference.architecture import Checkpoint
from specverify.reference.case import Case


class AgendaCases:
    """The cases of the plan's agenda: the saved ones, then those of its lanes in turn.

    A saved case that lies outside what the backend takes is passed over, and `tell` hears why.

    Attributes:
        exhausted: Whether a lane had fewer cases to draw than it should have.
    """

    def __init__(
        self, plan: Plan, invariants: tuple[Invariant, ...], subject: Subject, tell: Callable[[object], None]
    ) -> None:
        assert plan.agenda is not None
        self._plan = plan
        self._agenda = plan.agenda
        self._invariants = invariants
        self._subject = subject
        self._tell = tell
        self.exhausted = False

    def __iter__(self) -> Iterator[JudgedCase]:
        yield from self._saved_cases()
        yield from ((case, self._turns(case)) for case in self._drawn_cases())

    def _turns(self, case: Case) -> tuple[Invariant, ...]:
        return taking_turns(case, self._invariants, self._subject.pace)

    def _saved_cases(self) -> Iterator[JudgedCase]:
        for saved in self._agenda.own_saved():
            why = self._beyond(saved.case)
            if why is not None:
                self._tell(Passed(saved.case.id, why))
                continue
            turns = {invariant.name for invariant in self._turns(saved.case)} | {saved.invariant}
            yield saved.case, tuple(invariant for invariant in self._invariants if invariant.name in turns)

    def _beyond(self, case: Case) -> str | None:
        """Why this run cannot judge a saved case, or None."""
        if isinstance(case.model, Checkpoint) != (self._plan.model is not None):
            return "stands on a checkpoint" if self._plan.model is None else "stands on a built-in model"
        strange = [name for name in case.sampling.processors if name not in self._plan.processors]
        if strange:
            return f"names the processor {strange[0]}, which the profile does not"
        within = self._subject.abilities
        outside = within.outside(case) if within is not None else None
        return None if outside is None else f"the backend declines it: {outside}"

    def _drawn_cases(self) -> Iterator[Case]:
        within = _narrow_layouts(self._subject.abilities, self._agenda.layouts)
        running = [self._lane(lane, share, within) for lane, share in self._agenda.lanes(self._plan.cases)]
        while running:
            for lane in list(running):
                case = next(lane, None)
                if case is None:
                    running.remove(lane)
                else:
                    yield case

    def _lane(self, lane: int, share: int, within: Abilities | None) -> Iterator[Case]:
        plan, seeds = self._plan, self._agenda.seeds
        number = drawing_seed(seeds[lane % len(seeds)], lane)
        interval = self._subject.variant_interval
        stream = Stream(number, plan.dtypes, interval, within, processors=plan.processors, layout=plan.layout)
        num_given = 0
        for index, case in enumerate(stream):
            # Every stream begins with the plainest case, which the first lane judges.
            if index == 0 and lane:
                continue
            if num_given == share:
                return
            num_given += 1
            yield case
        self.exhausted |= num_given < share


def cases_of_part(cases: Iterator[JudgedCase], agenda: Agenda) -> Iterator[JudgedCase]:
    """The cases at the places of the agenda's part; those of prompts are made one after another."""
    return (case for index, case in enumerate(cases) if index % agenda.parts == agenda.part)


def _narrow_layouts(within: Abilities | None, layouts: tuple[str, ...]) -> Abilities | None:
    """`within`, with no KV layout beside `layouts`."""
    if within is None or not layouts:
        return within
    return replace(within, layouts=tuple(layout for layout in within.layouts if layout in layouts))
