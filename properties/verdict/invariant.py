"""Invariant: one statement about a case that must hold, and its check.

A statement has a name, one English sentence, the stages that it needs, and a check over two memoised functions
Case -> Trace: the oracle and the subject.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from specverify.properties.price import times_usual
from specverify.properties.verdict.finding import (
    Comparisons,
    ControlError,
    Evidence,
    Finding,
    IndexingCounts,
    Positions,
    PredictedTies,
    RoutingCounts,
    Tie,
)
from specverify.properties.verdict.subject import FULL, Pace, Subject
from specverify.reference.case import Case
from specverify.reference.trace import Stage, Step, Trace

Oracle = Callable[[Case], Trace]


@runtime_checkable
class Expects(Protocol):
    """An oracle that computes several steps at once where it knows which ones are asked for."""

    def expect(self, case: Case, steps: Iterable[Step]) -> None:
        """Take the steps that a run of `case` showed; each of them is judged."""
        ...


Fact = (
    Finding | Tie | Positions | PredictedTies | RoutingCounts | IndexingCounts | Evidence | ControlError | Comparisons
)
Check = Callable[[Case, Oracle, Subject], Iterator[Fact]]


class Unobserved(Exception):
    """Raised by a check whose evidence is not in the trace; never a pass, even after earlier comparisons."""


class NotApplicable(Exception):
    """Raised by a check that has nothing to say about this case, or nothing beyond the comparisons it has made."""


class NoReference(NotApplicable):
    """Raised by an oracle without an answer for a case: a backend in the oracle's place that declines or breaks."""


def always(case: Case) -> bool:
    """True: the `applies` of an invariant that speaks about every case."""
    return True


@dataclass(frozen=True)
class Invariant:
    """A statement that must hold, and its check.

    Attributes:
        name: `room.statement`.
        statement: One English sentence.
        needs: Stages without which the statement cannot be judged.
        check: Yields `Comparisons` for its comparisons, and the findings, ties and evidence that these show. Where the
            counts sum to 0 the judge calls the case not applicable; where no `Comparisons` came at all, unobserved.
        applies: Whether the statement says anything about a case.
        every: A search judges the invariant on one case in this many, chosen by the case's digest. Invariants that need
            further runs take turns in this way, so that a search sees more cases. A replay judges all.
        every_again: The same for sessions, and on a backend that shows every stage (`Pace`): of an invariant that runs
            the case, or each request of it, once more.
        speaks_of: `request` (in a session, each by itself), `session` as a whole, or `both`.
        promise: The field of `Abilities` that makes the statement, for one that only some engines promise; an engine
            that does not is not asked.
    """

    name: str
    statement: str
    needs: frozenset[Stage]
    check: Check
    applies: Callable[[Case], bool] = always
    every: int = 1
    every_again: int = 1
    speaks_of: str = "request"
    promise: str = ""

    @property
    def looks_at_run(self) -> bool:
        """Whether the check reads a request's run as it was, without asking for runs to compare with."""
        return self.every == 1 and self.speaks_of == "request"

    def interval(self, case: Case, pace: Pace = FULL) -> int:
        """Of so many cases like `case` a search judges the invariant on one, at this `pace` of the backend."""
        repeats_rarely = case.session is not None or pace.shows_all
        every = max(self.every, self.every_again) if repeats_rarely else self.every
        return every * pace.interval * times_usual(case) if every > 1 else 1


def taking_turns(
    case: Case, invariants: tuple[Invariant, ...], pace: Pace = FULL, always: frozenset[str] = frozenset()
) -> tuple[Invariant, ...]:
    """The invariants to judge on `case`, for a backend that is asked at this `pace`.

    On a case that is N times as dear as a usual one those that take turns do so N times as seldom: for the price of its
    variants several other cases are judged. Invariants named in `always` have their turn on every case.
    """
    # By the digest, so that the turns depend on the case and not on the order of the search.
    number = int(case.id, 16)

    def has_turn(index: int, invariant: Invariant) -> bool:
        # Those that run the case again share their runs, so that they share their turns.
        place = number + (index if invariant.every > 1 else 0)
        return place % invariant.interval(case, pace) == 0

    return tuple(
        invariant
        for index, invariant in enumerate(invariants)
        if invariant.name in always or has_turn(index, invariant)
    )


TURNS = 4
"""The `every` of invariants that run variants of a case."""

AGAIN = 2
"""The `every_again` of invariants that run the case once more."""


def needing(*stages: Stage) -> frozenset[Stage]:
    """The set of these stages, for `Invariant.needs`."""
    return frozenset(stages)
