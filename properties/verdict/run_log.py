"""The log of a run: what its cases were like, and when its workers did what."""

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from specverify.reference.architecture import Seeded
from specverify.reference.case import Case

OPENED, JUDGED, DIFFERED, UNJUDGED, FOUND, LOCATED, DIED, ENDED = (
    "opened", "judged", "differed", "not judged", "found", "made smaller", "died", "ended",
)  # fmt: skip
"""Events of a worker. FOUND begins the shrinking of a failure, LOCATED ends it."""

MAX_CASES = 500
"""Cases that a log keeps, from the first on: those whose conditions a report may look for."""

MOST_EVENTS = 100_000
"""Most events that a log keeps; longer runs are told up to there."""

PREFIXES = (1, 4, 16, 64, 256)
"""Upper ends of the classes of prefix lengths, in tokens."""

NODES = (1, 4, 8, 16, 32, 64)
"""Upper ends of the classes of tree sizes, in nodes."""


@dataclass(frozen=True)
class Event:
    """An event: the number of the worker, its kind, and seconds since the run began."""

    worker: int
    kind: str
    time_s: float


@dataclass
class RunLog:
    """The log of a run: its draws, and the events of its workers.

    Attributes:
        drawn: For each feature of cases the number of cases by value.
        cases: The first MAX_CASES cases.
        ended: Workers that have ended: their processes still end, which is no death.
        began: The time of the monotonic clock when the log was made.
    """

    drawn: dict[str, Counter[str]] = field(default_factory=dict)
    cases: list[Case] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)
    began: float = field(default_factory=time.monotonic, compare=False)

    def add(self, case: Case) -> None:
        """Count one case."""
        for name, value in features(case).items():
            self.drawn.setdefault(name, Counter())[value] += 1
        if len(self.cases) < MAX_CASES:
            self.cases.append(case)

    def absorb(self, part: "RunLog", cases: Iterable[Case]) -> None:
        """Count the cases of a part of the run, of which `cases` are the first, behind those that are counted."""
        for name, counts in part.drawn.items():
            self.drawn.setdefault(name, Counter()).update(counts)
        self.cases += islice(cases, MAX_CASES - len(self.cases))

    def note(self, worker: int, kind: str | None) -> None:
        """Note what a worker did just now; None is nothing to note."""
        if kind is None or worker in self.ended:
            return
        if kind == ENDED:
            self.ended.add(worker)
        if len(self.events) < MOST_EVENTS:
            self.events.append(Event(worker, kind, time.monotonic() - self.began))


def features(case: Case) -> dict[str, str]:
    """The features of a case by which a report tells what a run drew: a name and a value each."""
    requests = 1 if case.session is None else 1 + len(case.session.mates)
    greedy = case.sampling.greedy
    return {
        "kind of draft": case.draft.TAG,
        "nodes of the largest tree": _class(case.most_nodes, NODES),
        "tokens before the first step": _class(len(case.prefix), PREFIXES),
        "KV layout": case.layout.kind,
        "tokens are chosen": "greedily" if greedy else f"by drawing, rule {case.sampling.rule.name}",
        "working dtype": case.dtype,
        "requests side by side": str(requests),
        "model": case.model.architecture.family if isinstance(case.model, Seeded) else "checkpoint",
    }


def _class(value: int, ends: tuple[int, ...]) -> str:
    """The class of `value`: `5 to 8`.

    >>> [_class(value, (1, 4, 8)) for value in (0, 1, 2, 8, 9)]
    ['up to 1', 'up to 1', '2 to 4', '5 to 8', 'more than 8']
    """
    before = None
    for end in ends:
        if value <= end:
            return f"up to {end}" if before is None else f"{before + 1} to {end}"
        before = end
    return f"more than {ends[-1]}"
