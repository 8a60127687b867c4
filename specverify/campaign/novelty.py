"""Novelty: which of the drawn cases are judged, by the pairs of values that no case before them had.

A case costs ten times as much to judge as to draw. So some more are drawn than judged, and those are left out that add
least to the coverage by pairs (see `specverify.properties.verdict.coverage`) for what they cost to judge
(`specverify.properties.price`). What a case has decides alone, not what its run reached: the seed decides the cases,
whatever an engine does.
"""

from collections import Counter, deque

from specverify.properties.price import price_ms
from specverify.properties.verdict.coverage.pairs import bits_of, values_of_requests
from specverify.reference.case import Case

RECENT = 16
"""Drawn cases of its kind, a single request or a session, with which the next is compared."""

LEFT_OUT = 2
"""Of so many drawn cases one is left out, or somewhat more: those with fewest new pairs for their price."""


class Novelty:
    """The pairs of the cases that were drawn so far.

    Attributes:
        met: The pairs of those that are judged, as bits.
        requests: For each place in LABELS the number of their requests with this value.
    """

    def __init__(self) -> None:
        self.met = 0
        self.requests: Counter[int] = Counter()
        self._recent = {False: deque[float](maxlen=RECENT), True: deque[float](maxlen=RECENT)}
        self._ties = 0

    def takes(self, case: Case) -> bool:
        """Whether `case` is to be judged: it is not among the LEFT_OUT least of its kind, or every second that ties."""
        requests = tuple(values_of_requests(case))
        bits = 0
        for places in requests:
            bits |= bits_of(places)
        gain = (bits & ~self.met).bit_count() / price_ms(case)
        recent = self._recent[case.session is not None]
        border = sorted(recent)[len(recent) // LEFT_OUT] if recent else -1
        recent.append(gain)
        self._ties += gain == border
        if gain < border or (gain == border and self._ties % 2 == 0):
            return False
        self.met |= bits
        for places in requests:
            self.requests.update(places)
        return True
