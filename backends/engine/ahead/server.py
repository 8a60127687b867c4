"""The server that runs a step ahead of its host.

A launch drafts, verifies, accepts and commits on the device. Its results are resolved later: text, stops and grammar
belong to the host, which knows neither the tokens nor their number before. The device therefore commits whole paths,
and a request that has ended may run once more; that frame is skipped.
"""

from collections import Counter, deque
from dataclasses import replace
from functools import partial

from backends.engine.ahead.passing import HandOverServer
from backends.engine.kv.arena import CacheLease
from backends.engine.model.models import ModelCache
from backends.engine.overlap.cutting import cut_to
from backends.engine.overlap.frame import Frame, Launched, Place
from backends.engine.overlap.reservation import fits
from backends.engine.overlap.streams import stream_on
from backends.engine.request import Request
from backends.engine.seams import Seams
from backends.engine.step.naming import naming
from reference.case import Case
from reference.session import Account, Action, Event
from reference.trace import Trace

READS_TEXT = ("step", "first", "fork", "switch", "hand-over")
"""Actions that read texts: everything in flight is resolved before them."""


class OverlapServer(HandOverServer):
    """A server with launched steps; without `launch` it does what a `Server` does.

    Attributes:
        events: The launches, and the results that the host took or skipped.
    """

    def __init__(self, case: Case, shelf: ModelCache, seams: Seams) -> None:
        super().__init__(case, shelf, seams)
        self.events: list[Event] = []
        self._overlap = seams.overlap
        self._futures = self._overlap.futures()
        self._stream = stream_on(self._target.device)
        self._frames: deque[Frame] = deque()
        self._last = Frame((), lambda: None)
        self._launches = 0
        self._action = -1
        self._epochs = Counter[int]()
        self._reopened: set[int] = set()

    def do(self, action: Action) -> None:
        """See `Server.do`."""
        self._action += 1
        if action.kind in READS_TEXT:
            while self._frames:
                self._resolve()
        super().do(action)

    def _apply(self, action: Action, numbers: tuple[int, ...]) -> None:
        if action.kind == "launch":
            self._launch(numbers)
        elif action.kind == "resolve":
            mine = self._in_flight(numbers[0]) if numbers else []
            while mine and self._frames and self._frames[0].parts[0].place.frame <= mine[0].place.frame:
                self._resolve()
        else:
            super()._apply(action, numbers)

    def _one(self, action: Action, number: int) -> None:
        if action.kind == "preempt" and not self._goes_on(number):
            return
        super()._one(action, number)
        if action.kind in ("evict", "cancel"):
            request = self.requests[number]
            if action.kind == "evict":
                self._epochs[number] += 1
                if request.tokens != request.resolved:
                    self._reopened.add(number)
                    request.rewind()
            request.tokens = request.resolved

    def _resume(self, number: int, request: Request) -> None:
        if number not in self._reopened:
            super()._resume(number, request)
            return
        # The draft has read tokens that never counted.
        self._reopened.discard(number)
        calls = request.draft.calls
        request.draft = self._draft(request.case, request.lease, request.draft_steps)
        request.draft.calls += calls

    def _in_flight(self, number: int) -> list[Launched]:
        """The parts of request `number` whose results the host has not taken or skipped, the oldest first."""
        return [part for frame in self._frames for part in frame.parts if part.place.number == number]

    def _ahead(self, number: int) -> list[Launched]:
        """The parts in flight that may still count."""
        return [part for part in self._in_flight(number) if part.place.epoch == self._epochs[number]]

    def _ready(self, request: Request) -> bool:
        flying = len(request.tokens) - len(request.resolved)
        if not flying:
            return super()._ready(request)
        known = len(request.resolved)
        columns = known + self._overlap.reserved(self._rows)
        return fits(request.case, known, flying) and self._room(request.lease, columns)

    def _launch(self, numbers: tuple[int, ...]) -> None:
        while any(len(self._in_flight(number)) > 1 for number in numbers):
            self._resolve()
        self._poison()
        numbers = tuple(number for number in numbers if number in self.living and self._goes_on(number))
        batch = [self.requests[number] for number in numbers]
        if not batch:
            return
        owned = [_table(request.lease) for request in batch]
        parts, wait = self._stream.launch(partial(self._execute, numbers, batch))
        for part, request, pages in zip(parts, batch, owned, strict=True):
            self._futures.put(part.place, part.verdict.accepted)
            request.tokens.append(part.place.placeholder)
            place, inputs, written = part.place, _inputs(request, part), _written(request, part)
            self.events.append(Event("launched", self._action, place.number, place.frame, inputs, pages, written))
        self._last = Frame(parts, wait)
        self._frames.append(self._last)
        self._launches += 1

    def _goes_on(self, number: int) -> bool:
        """Whether the request can be launched now; its grammar reads the results in flight, which its masks need."""
        request = self.requests[number]
        if request.guide is not None:
            # A grammar reads one result ahead of the host: a second one needs the text that the first has given.
            while len(self._in_flight(number)) > 1:
                self._resolve()
            if request.finish is not None:
                return False
            for part in self._ahead(number):
                with naming(request):
                    ended = self._overlap.read(request, part).finish
                request.finish = None  # the host learns of the end when it resolves the frame
                if ended is not None:
                    return False
        return self._ready(request)

    def _execute(self, numbers: tuple[int, ...], batch: list[Request]) -> tuple[Launched, ...]:
        """The device's part of a step: draft, verify, accept, and commit the whole path."""
        for number, request in zip(numbers, batch, strict=True):
            request.filled = partial(self._futures.filled, number)
        found = []
        for row, (number, (flat, heads)) in enumerate(zip(numbers, self._forward(batch), strict=True)):
            request = batch[row]
            with naming(request):
                verdict = request.accept(flat, heads)
                committed = request.commit(verdict, verdict.path)
            found.append(Launched(Place(number, self._epochs[number], self._launches, row), verdict, committed))
        return tuple(found)

    def _resolve(self) -> None:
        """Take the results of the oldest frame."""
        frame = self._frames.popleft()
        frame.wait()
        for part in frame.parts:
            number = part.place.number
            request = self.requests[number]
            part.verdict = replace(part.verdict, accepted=self._overlap.results(part, self._last))
            self._futures.drop(part.place)
            if self._overlap.counts(part, self._epochs[number], number in self._over):
                with naming(request):
                    self._take(number, request, part)
            else:
                self.events.append(Event("skipped", self._action, part.place.number, part.place.frame))

    def _take(self, number: int, request: Request, part: Launched) -> None:
        emission = self._overlap.read(request, part)
        ahead = [one for one in request.tokens if one < 0 and one != part.place.placeholder]
        request.tokens = request.resolved
        request.finish = emission.finish
        # The device kept the whole path; the host keeps as many rows as there are emitted tokens.
        kept = len(part.verdict.shown.context) + len(emission.tokens)
        request.record(part.verdict, emission, cut_to(part.committed, kept))
        step = len(request.steps) - 1
        self.events.append(
            Event("counted", self._action, number, part.place.frame, tokens=tuple(emission.tokens), step=step)
        )
        self._tries.learn(number, request.case.draft, request.tokens)
        if request.finish is None:
            request.tokens += ahead
        elif number not in self._over:
            self._end(number)

    def _account(self) -> Account:
        account = super()._account()
        known = {number: len(self.requests[number].resolved) - 1 for number in account.committed if self._ahead(number)}
        return replace(account, committed={**account.committed, **known})

    @property
    def trace(self) -> Trace:
        """See `Server.trace`; results in flight are not part of it."""
        own = super().trace
        return own if own.shared is None else replace(own, shared=replace(own.shared, events=tuple(self.events)))


def _table(lease: CacheLease) -> tuple[int, ...]:
    return () if lease.blocks is None else tuple(lease.blocks.table)


def _inputs(request: Request, part: Launched) -> tuple[int, ...]:
    """The tokens that the device has read: the output before the step, and the tree."""
    context, tree = part.verdict.shown.context, part.verdict.block.proposal.tree
    return (*context[len(request.case.prompt) :], *tree.token)


def _written(request: Request, part: Launched) -> tuple[int, ...]:
    """The pages to which the rows of the verify forward were written."""
    blocks = request.lease.blocks
    if blocks is None:
        return ()
    begin = part.committed.length - len(part.verdict.path)
    end = begin + len(part.verdict.block.tensors.token)
    return tuple(blocks.table[begin // blocks.size : (end - 1) // blocks.size + 1])
