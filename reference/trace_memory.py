"""TraceMemory: the last traces that were made, so that several invariants may ask for the same one.

It is bounded by number and by bytes: a block of 64 rows over a vocabulary of 151,936 takes 78 MB of logits alone.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from specverify.reference.trace import Array, Step, Trace

Outcome = TypeVar("Outcome")

MOST_BYTES = 2**28
"""Bytes of arrays that a memory holds at most, beside the latest trace."""


class TraceMemory(Generic[Outcome]):
    """Outcomes of runs by key; the one that was not asked for the longest goes first. What is no trace takes no bytes.

    Attributes:
        most_bytes: Bytes of arrays that are remembered beside the latest outcome.
    """

    def __init__(self, keep: int, most_bytes: int = MOST_BYTES) -> None:
        """Hold at most `keep` outcomes, and `most_bytes` of arrays beside the latest of them."""
        self._keep = keep
        self.most_bytes = most_bytes
        self._outcomes: OrderedDict[Hashable, Outcome] = OrderedDict()
        self._sizes: dict[Hashable, int] = {}

    def __len__(self) -> int:
        return len(self._outcomes)

    def get(self, key: Hashable) -> Outcome | None:
        """The outcome of `key`, if it is still there."""
        if key in self._outcomes:
            self._outcomes.move_to_end(key)
        return self._outcomes.get(key)

    def put(self, key: Hashable, outcome: Outcome) -> None:
        """Remember an outcome, and forget the oldest as the bounds ask."""
        self._outcomes[key] = outcome
        self._outcomes.move_to_end(key)
        self._sizes[key] = size_of(outcome) if isinstance(outcome, Trace) else 0
        while len(self._outcomes) > self._keep or (
            len(self._outcomes) > 1 and sum(self._sizes.values()) > self.most_bytes
        ):
            oldest, _ = self._outcomes.popitem(last=False)
            del self._sizes[oldest]


def size_of(trace: Trace) -> int:
    """The bytes of the large arrays of a trace, each counted once: scores, laws, proposals, and keys and values."""
    return sum({id(array): array.nbytes for array in _arrays(trace)}.values())


def _arrays(trace: Trace) -> Iterator[Array]:
    for step in trace.steps:
        yield from _arrays_of_step(step)
    for request in () if trace.shared is None else trace.shared.requests:
        if request is not None and request is not trace:
            yield from _arrays(request)


def _arrays_of_step(step: Step) -> Iterator[Array]:
    drafted, scored, committed = step.drafted, step.scored, step.committed
    arrays = [] if drafted is None else [drafted.logits, drafted.proposal]
    arrays += [] if scored is None else [scored.logits, scored.law, scored.legal]
    # A step begins with the columns that the last one committed, which are one array then.
    caches = [] if committed is None else [committed.before, committed.verified, committed.after, committed.draft]
    arrays += [array for cache in caches if cache is not None for array in (cache.keys, cache.values)]
    yield from (array for array in arrays if array is not None)
