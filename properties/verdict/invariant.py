"""Invariant: a name, one English sentence, the stages it needs, and a check over two memoised Case -> Trace."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from properties.verdict.finding import Compared, Evidence, Finding, Positions, Tie
from properties.verdict.subject import Subject
from reference.case import Case
from reference.trace import Stage, Trace

Oracle = Callable[[Case], Trace]
Fact = Finding | Tie | Positions | Evidence | Compared
Check = Callable[[Case, Oracle, Subject], Iterator[Fact]]


class Unobserved(Exception):
    """Raised by a check whose evidence the trace does not hold; never a pass, whatever was compared before."""


class NotApplicable(Exception):
    """Raised by a check that has nothing to say about this case, or nothing more than what it compared before."""


class NoReference(NotApplicable):
    """Raised by an oracle that has no answer for a case: a backend in the oracle's place that declines or breaks."""


def always(case: Case) -> bool:
    """An invariant that speaks about every case."""
    return True


@dataclass(frozen=True)
class Invariant:
    """A statement that must hold, and its check.

    Attributes:
        name: `room.statement`.
        statement: One English sentence.
        needs: Stages without which it cannot be judged.
        check: Yields `Compared` for what it compares, and the findings, ties and evidence that this shows. Where the
            counts sum to 0 the judge calls the case not applicable; where no `Compared` came at all, unobserved.
        applies: Whether it has anything to say about a case.
        every: A search judges it on one case in this many, chosen by the case's digest; those that need runs of their
            own take turns, so that a search sees more cases. A replay judges all.
        speaks_of: `request` (in a session, of each by itself), `session` as a whole, or `both`.
    """

    name: str
    statement: str
    needs: frozenset[Stage]
    check: Check
    applies: Callable[[Case], bool] = always
    every: int = 1
    speaks_of: str = "request"

    @property
    def looks_at_run(self) -> bool:
        """Whether it judges a request's run as it was, without asking for others to compare it with."""
        return self.every == 1 and self.speaks_of == "request"


def taking_turns(case: Case, invariants: tuple[Invariant, ...], variant_interval: int = 1) -> tuple[Invariant, ...]:
    """The invariants whose turn it is on `case`; those that take turns do so `variant_interval` times as seldom."""
    number = int(case.id, 16)
    return tuple(
        one
        for at, one in enumerate(invariants)
        if (number + at) % (one.every * variant_interval if one.every > 1 else 1) == 0
    )


TURNS = 4
"""`every` of the invariants that run variants of a case."""


def needing(*stages: Stage) -> frozenset[Stage]:
    """The stages, as `Invariant.needs` holds them."""
    return frozenset(stages)
