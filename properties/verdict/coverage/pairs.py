"""Pairs: which two values, or value and event, met in one judged request, as bits of an integer."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations

from specverify.properties.verdict.coverage.axes import AXES
from specverify.properties.verdict.coverage.events import EVENTS
from specverify.properties.verdict.coverage.request import JudgedRequest
from specverify.reference.case import Case
from specverify.reference.trace import Trace

UNSEEN = Trace((), (), None)
"""The trace of a run that nobody saw."""

EVENT = "event"
"""The axis of events."""


@dataclass(frozen=True)
class Label:
    """A value of an axis, or an event."""

    axis: str
    value: str

    def __str__(self) -> str:
        return f"{self.axis} {self.value}"


LABELS = (
    *(Label(axis.name, value) for axis in AXES for value in axis.values),
    *(Label(EVENT, event.name) for event in EVENTS),
)
"""Every label, in the order of the tables."""

_PLACES = {label: place for place, label in enumerate(LABELS)}


@dataclass(frozen=True)
class Pair:
    """Two labels that one request may have, the first of them earlier in LABELS."""

    first: Label
    second: Label

    @property
    def bit(self) -> int:
        """The pair's bit in an integer of pairs."""
        return _bit(_PLACES[self.first], _PLACES[self.second])

    def __str__(self) -> str:
        return f"{self.first} × {self.second}"


def _bit(first: int, second: int) -> int:
    return 1 << (first * len(LABELS) + second)


@cache
def candidate_pairs() -> tuple[Pair, ...]:
    """Every two labels but two values of an axis of which a request has one, and but two events."""
    one_value = {axis.name for axis in AXES if not axis.several} | {EVENT}
    return tuple(
        Pair(first, second)
        for first, second in combinations(LABELS, 2)
        if first.axis != second.axis or first.axis not in one_value
    )


def bits_of(places: Iterable[int]) -> int:
    """The pairs of the labels at these places in LABELS, as bits."""
    bits = 0
    for first, second in combinations(sorted(places), 2):
        bits |= _bit(first, second)
    return bits


def labels_of(request: JudgedRequest) -> tuple[Label, ...]:
    """The values and events of one request, in the order of LABELS."""
    labels = [Label(axis.name, value) for axis in AXES for value in set(axis.of(request))]
    reached = [Label(EVENT, event.name) for event in EVENTS if event.is_reached(request)]
    return tuple(sorted((*labels, *reached), key=_PLACES.__getitem__))


def values_of_requests(case: Case) -> Iterator[tuple[int, ...]]:
    """For each request of a case, the places in LABELS of the values that it has, whatever its run reaches."""
    for number in range(1 if case.session is None else 1 + len(case.session.mates)):
        request = JudgedRequest(case, number, UNSEEN)
        yield tuple(sorted(_PLACES[Label(axis.name, value)] for axis in AXES for value in set(axis.of(request))))


def labels_of_requests(case: Case, trace: Trace) -> tuple[tuple[int, ...], ...]:
    """For each request of a case that the trace shows, the places of its labels in LABELS."""
    if case.session is None or trace.shared is None:
        requests = [JudgedRequest(case, 0, trace)]
    else:
        requests = [
            JudgedRequest(case, number, run, trace.shared)
            for number, run in enumerate(trace.shared.requests)
            if run is not None
        ]
    return tuple(tuple(_PLACES[label] for label in labels_of(request)) for request in requests)
