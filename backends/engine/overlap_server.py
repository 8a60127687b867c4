"""The server that runs a step ahead of its host.

A launch drafts, verifies, accepts and commits on the device. Its results are resolved later: text, stops and grammar
belong to the host, which knows neither the tokens nor their number before. The device therefore commits whole paths,
and a request that has ended may run once more; that frame is skipped.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

import torch

from specverify.backends.engine.kv.arena import CacheLease
from specverify.backends.engine.model.models import ModelCache
from specverify.backends.engine.overlap import Frame, LaunchedRow, Place
from specverify.backends.engine.request import Request
from specverify.backends.engine.seams import Seams
from specverify.backends.engine.server import Server
from specverify.backends.engine.step.naming import naming_stage
from specverify.reference.case import Case
from specverify.reference.session import Account, Action, Event
from specverify.reference.trace import Committed, Kv, Trace, frozen

Result = TypeVar("Result")

READS_TEXT = ("step", "first", "fork", "switch", "hand-over")
"""Actions that read texts: everything in flight is resolved before them."""


class Stream(Protocol):
    """Runs launched work in the order of the launches."""

    def launch(self, work: Callable[[], Result]) -> tuple[Result, Callable[[], None]]:
        """Run `work`; return its result, and a function that returns when the device has executed it."""
        ...


class ImmediateStream:
    """A CPU executes work when it is launched; the host alone is late."""

    def launch(self, work: Callable[[], Result]) -> tuple[Result, Callable[[], None]]:
        """See `Stream`."""
        return work(), lambda: None


class CudaStream:
    """A stream beside the device's default one; an event is recorded behind each launch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def launch(self, work: Callable[[], Result]) -> tuple[Result, Callable[[], None]]:
        """See `Stream`; work on the default stream, such as a prefill, is waited for first, and waits for this."""
        default = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(default)
        with torch.cuda.stream(self._stream):
            result = work()
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        # Caches that the host gives to another request are written by the default stream: behind this launch.
        default.wait_event(event)
        return result, event.synchronize


def stream_on(device: torch.device) -> Stream:
    """The stream for launches on `device`."""
    return CudaStream(device) if device.type == "cuda" else ImmediateStream()


class OverlapServer(Server):
    """A server with launched steps; without `launch` it does what a `Server` does.

    Attributes:
        events: The launches, and the results that the host took or skipped.
    """

    def __init__(self, case: Case, shelf: ModelCache, seams: Seams) -> None:
        super().__init__(case, shelf, seams)
        self.events: list[Event] = []
        self._futures = seams.futures()
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
            self._launch(numbers, action.undrafted)
        elif action.kind == "resolve":
            launched = self._in_flight(numbers[0]) if numbers else []
            while launched and self._frames and self._frames[0].parts[0].place.frame <= launched[0].place.frame:
                self._resolve()
        else:
            super()._apply(action, numbers)

    def _apply_to(self, action: Action, number: int) -> None:
        if action.kind == "preempt":
            # Its block stands behind the step in flight, as that of a launch: the room is that of two steps.
            self._leave_one_in_flight((number,))
            if number not in self.living or not self._can_launch(number):
                return
        super()._apply_to(action, number)
        if action.kind in ("evict", "cancel"):
            request = self.requests[number]
            if action.kind == "evict":
                self._epochs[number] += 1
                if request.tokens != request.resolved_tokens:
                    self._reopened.add(number)
                    request.rewind()
            request.tokens = request.resolved_tokens

    def _resume(self, number: int, request: Request) -> None:
        if number not in self._reopened:
            super()._resume(number, request)
            return
        # The draft has read tokens that never counted.
        self._reopened.discard(number)
        calls = request.draft.calls
        request.draft = self._draft(request.case, request.lease, request.draft_steps)
        request.draft.calls += calls

    def _in_flight(self, number: int) -> list[LaunchedRow]:
        """The parts of request `number` whose results the host has not taken or skipped, the oldest first."""
        return [part for frame in self._frames for part in frame.parts if part.place.number == number]

    def _countable(self, number: int) -> list[LaunchedRow]:
        """The parts in flight that may still count."""
        return [part for part in self._in_flight(number) if part.place.epoch == self._epochs[number]]

    def _can_step(self, request: Request) -> bool:
        num_placeholders = len(request.tokens) - len(request.resolved_tokens)
        if not num_placeholders:
            return super()._can_step(request)
        num_tokens = len(request.resolved_tokens)
        return fits(request.case, num_tokens, num_placeholders) and self._reserve_ahead(request)

    def _reserve_ahead(self, request: Request) -> bool:
        """Whether the pool has pages for two steps beyond the columns that the host knows to be committed."""
        committed = len(request.resolved_tokens) - 1
        return self._room(request.lease, committed + self._arena.reserved_columns(request.case.draft))

    def _launch(self, numbers: tuple[int, ...], bare: frozenset[int] = frozenset()) -> None:
        self._leave_one_in_flight(numbers)
        self._poison()
        numbers = tuple(number for number in numbers if number in self.living and self._can_launch(number))
        batch = [self.requests[number] for number in numbers]
        if not batch:
            return
        for request in batch:
            # SGLang reserves two steps at every launch. The first needs the pages of one alone, if there are no others.
            self._reserve_ahead(request)
        page_tables = [_page_table(request.lease) for request in batch]
        parts, wait = self._stream.launch(partial(self._execute, numbers, batch, self._undrafted(bare)))
        for part, request, pages in zip(parts, batch, page_tables, strict=True):
            self._futures.put(part.place, part.verdict.accepted)
            request.tokens.append(part.place.placeholder)
            place = part.place
            inputs = _read_tokens(request, part)
            written = _written_pages(request, part)
            self.events.append(Event("launched", self._action, place.number, place.frame, inputs, pages, written))
        self._last = Frame(parts, wait)
        self._frames.append(self._last)
        self._launches += 1

    def _leave_one_in_flight(self, numbers: tuple[int, ...]) -> None:
        """Take results until each of `numbers` has one step in flight at most."""
        while any(len(self._in_flight(number)) > 1 for number in numbers):
            self._resolve()

    def _can_launch(self, number: int) -> bool:
        """Whether the request can be launched now; its grammar reads the results in flight, which its masks need."""
        request = self.requests[number]
        if request.guide is not None:
            # A grammar reads one result ahead of the host: a second one needs the text that the first has given.
            while len(self._in_flight(number)) > 1:
                self._resolve()
            if request.finish is not None:
                return False
            for part in self._countable(number):
                with naming_stage(request):
                    finish = request.emit_launched(part).finish
                request.finish = None  # the host learns of the end when it resolves the frame
                if finish is not None:
                    return False
        return self._can_step(request)

    def _execute(self, numbers: tuple[int, ...], batch: list[Request], bare: list[Request]) -> tuple[LaunchedRow, ...]:
        """The device's part of a step: draft, verify, accept, and commit the whole path."""
        for number, request in zip(numbers, batch, strict=True):
            request.fill = partial(self._futures.fill, number)
        launched = []
        for row, (number, (flat, heads)) in enumerate(zip(numbers, self._forward(batch, bare), strict=True)):
            request = batch[row]
            with naming_stage(request):
                verdict = request.accept(flat, heads)
                committed = request.commit(verdict, verdict.path)
            launched.append(LaunchedRow(Place(number, self._epochs[number], self._launches, row), verdict, committed))
        return tuple(launched)

    def _resolve(self) -> None:
        """Take the results of the oldest frame."""
        frame = self._frames.popleft()
        frame.wait()
        for part in frame.parts:
            number = part.place.number
            request = self.requests[number]
            part.verdict = replace(part.verdict, accepted=self._futures.results(part, self._last))
            self._futures.drop(part.place)
            if self._futures.is_counted(part, self._epochs[number], number in self._ended):
                with naming_stage(request):
                    self._record_results(number, request, part)
            else:
                self.events.append(Event("skipped", self._action, part.place.number, part.place.frame))

    def _record_results(self, number: int, request: Request, part: LaunchedRow) -> None:
        emission = request.emit_launched(part)
        placeholders = [token for token in request.tokens if token < 0 and token != part.place.placeholder]
        request.tokens = request.resolved_tokens
        request.finish = emission.finish
        # The device kept the whole path; the host keeps as many rows as there are emitted tokens.
        length = len(part.verdict.step.context) + len(emission.tokens)
        request.record(part.verdict, emission, cut_commit(part.committed, length))
        step = len(request.steps) - 1
        self.events.append(
            Event("counted", self._action, number, part.place.frame, tokens=tuple(emission.tokens), step=step)
        )
        self._tries.learn(number, request.case.draft, request.tokens)
        if request.finish is None:
            request.tokens += placeholders
        elif number not in self._ended:
            self._end(number)

    def _account(self) -> Account:
        account = super()._account()
        lengths = {
            number: len(self.requests[number].resolved_tokens) - 1
            for number in account.committed
            if self._countable(number)
        }
        return replace(account, committed={**account.committed, **lengths})

    @property
    def trace(self) -> Trace:
        """See `Server.trace`; results in flight are not part of it."""
        trace = super().trace
        return (
            trace if trace.shared is None else replace(trace, shared=replace(trace.shared, events=tuple(self.events)))
        )


def _page_table(lease: CacheLease) -> tuple[int, ...]:
    """The pages of its block tables; those of drafts that have their own are numbered on from the target's."""
    tables = [blocks for blocks, _ in lease.tables]
    before = [0, *(blocks.pages.total for blocks in tables)]
    return tuple(page + first for blocks, first in zip(tables, before, strict=False) for page in blocks.table)


def _read_tokens(request: Request, part: LaunchedRow) -> tuple[int, ...]:
    """The tokens that the device has read: the output before the step, and the tree."""
    context = part.verdict.step.context
    tree = part.verdict.block.proposal.tree
    return (*context[len(request.case.prompt) :], *tree.token)


def _written_pages(request: Request, part: LaunchedRow) -> tuple[int, ...]:
    """The pages to which the rows of the draft and of the verify forward were written."""
    pages: list[int] = []
    begin = part.committed.length - len(part.verdict.path)
    first = 0
    for place, (blocks, _) in enumerate(request.lease.tables):
        end = max(0 if place else begin + len(part.verdict.block.tensors.token), blocks.end)
        pages += [page + first for page in blocks.table[begin // blocks.size : (end - 1) // blocks.size + 1]]
        first += blocks.pages.total
    return tuple(pages)


def fits(case: Case, tokens: int, flying: int) -> bool:
    """Whether the next tree lies inside the model's positions, however much the steps in flight accept.

    The host knows so many `tokens` of the request; `flying` counts its steps in flight.
    """
    height = case.draft.height
    return tokens + flying * (height + 1) + height <= case.max_positions


def cut_commit(committed: Committed, length: int) -> Committed:
    """`committed` with the first `length` columns; recurrent states, and caches that let columns go, are not shown."""
    if committed.length <= length:
        return committed
    cache_after = _cut_kv(committed.after, length)
    draft = _cut_kv(committed.draft, length)
    return replace(committed, length=length, after=cache_after, draft=draft, recurrent=None)


def _cut_kv(kv: Kv | None, length: int) -> Kv | None:
    if kv is None or kv.length <= length:
        return kv
    # A layer with a window has let go of columns that it would still hold at this length.
    if kv.first or not length:
        return None
    return Kv(frozen(kv.keys[:, :, :length]), frozen(kv.values[:, :, :length]))
