"""The server, on which the requests of a case share models, caches and forwards.

`do` applies one action of a session at a time. An action changes only the requests that admit it: a request that met a
stop takes no step, and a request without pages waits.

In a hand-over, to itself or by way of another process, a request leaves as bytes and enters again from them. What is
sent, and what is refused, is what two servers would send and refuse.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import methodcaller

import torch
from torch import Tensor

from specverify.backends.base import StageFailure, Unsupported
from specverify.backends.engine.batch import decide_together, draft_together
from specverify.backends.engine.captured.runner import LevelRunner
from specverify.backends.engine.draft import Draft, Opening, open_draft
from specverify.backends.engine.draft.head import state_needs
from specverify.backends.engine.draft.ngram_trie import SharedTries
from specverify.backends.engine.handover.packet import ExpectedRequest, pack
from specverify.backends.engine.kv.arena import CacheLease, CacheNeeds, refuse_small_pool
from specverify.backends.engine.kv.base import OutOfPages
from specverify.backends.engine.kv.pages import Blocks, Pages
from specverify.backends.engine.kv.prefix import PrefixCache
from specverify.backends.engine.model.absent import AbsentModel
from specverify.backends.engine.model.models import ModelCache
from specverify.backends.engine.open_models import OpenModels
from specverify.backends.engine.request import Request
from specverify.backends.engine.seams import Seams
from specverify.backends.engine.step.naming import naming_stage
from specverify.reference.case import Case, marks
from specverify.reference.draft import most_rows
from specverify.reference.malformed import Malformed
from specverify.reference.session import Account, Action, Roster, Session
from specverify.reference.trace import Shared, Stage, Trace

FILLING = ("add", "step", "first", "cancel")
"""Actions that a prompt may meet that is filled chunk by chunk; before any other action the rest of it is prefilled."""


class Server:
    """The requests of one case: request 0 is the case's own, request n the n-th mate of its session.

    Attributes:
        session: The mates, and the actions known beforehand.
        requests: The requests that have entered, by number.
        accounts: Pages and columns after each action.
        prefill_alone: How a request without a session is prefilled.
    """

    def __init__(self, case: Case, shelf: ModelCache, seams: Seams) -> None:
        self.case = case
        self.requests: dict[int, Request] = {}
        self.accounts: list[Account] = []
        # By name, since a kind of request may prefill in its own way.
        self.prefill_alone: Callable[[Request], None] = methodcaller("prefill")
        self.session = case.session or Session()
        seams = replace(seams, kv=seams.kv.with_left_pad(case.layout.left_pad))
        self._seams = seams
        self._models = OpenModels(shelf)
        self._evicted: set[int] = set()
        self._ended: set[int] = set()
        self._batch_size = 1
        self._tries = SharedTries()
        self._target = self._models.target(case, seams)
        plans = [case.alone(number) for number in range(1 + len(self.session.mates))]
        drafts = [plan.draft for plan in plans] + [
            action.draft for action in self.session.actions if action.draft is not None
        ]
        self._rows = max(case.layout.padded_nodes, *map(most_rows, drafts)) + 1
        self._levels = None if seams.captured_drafts is None else LevelRunner(seams.captured_drafts, self._rows)
        # A request of a session may be launched once more before the host knows that it is over.
        self._capacity = self.longest_text(plans) + self._rows * (1 if case.session is None else 2)
        pages = case.layout.pages_for(self._capacity) * len(plans) if case.layout.traits.pages else 0
        if case.session is None:  # in a session a request waits until others give pages back
            refuse_small_pool(case.layout, self._capacity)
        draft_pages = case.layout.of_draft.pages_for(self._capacity) * len(plans) if case.layout.traits.pages else 0
        self._arena = seams.arena(case.layout, pages, seams.kv, draft_pages)

    def longest_text(self, plans: list[Case]) -> int:
        """The most tokens that one request may have, of those that enter as `plans`.

        A fork may come at any time and begins with all tokens of its source, so one request may need room for all.
        """
        return sum(plan.longest for plan in plans)

    def do(self, action: Action) -> None:
        """Apply `action` to each of its requests that admits it; do nothing if no request does.

        Raises:
            StageFailure: for every error, with the stage in which it occurred.
        """
        numbers = self._admitted(action)
        if action.kind not in FILLING:
            self._fill(numbers)
        self._apply(action, numbers)
        self.accounts.append(self._account())

    def _fill(self, numbers: tuple[int, ...]) -> None:
        """Prefill at once what is left of the prompts of `numbers`."""
        for request in (self.requests[number] for number in numbers if number in self.living):
            if request.filling:
                with naming_stage(request):
                    request.prefill()

    def _apply(self, action: Action, numbers: tuple[int, ...]) -> None:
        """Apply `action` to the requests `numbers`, which admit it."""
        if action.kind in ("step", "first"):
            self._step(numbers, action.undrafted)
        elif action.kind == "fork" and len(numbers) == 2:
            self._fork(*numbers)
        elif action.kind != "fork":
            for number in numbers:
                self._apply_to(action, number)

    def _admitted(self, action: Action) -> tuple[int, ...]:
        return self._roster.admitted(action)

    @property
    def living(self) -> set[int]:
        """Requests that can take a step."""
        return self._roster.living

    @property
    def _roster(self) -> Roster:
        return Roster(1 + len(self.session.mates), set(self.requests), self._evicted, self._ended)

    def _apply_to(self, action: Action, number: int) -> None:
        if action.kind == "add":
            self._add(number)
            return
        request = self.requests[number]
        if action.kind == "preempt":
            if self._can_step(request):
                self._batch_size = 1  # the tree is thrown away, whatever batch it was meant for
                with naming_stage(request):
                    request.propose()
                request.abandon()
        elif action.kind == "cancel":
            self._end(number)
        elif action.kind == "hand-over":
            self._hand_over(number)
        elif action.kind == "evict":
            tokens = request.keepable_tokens if self.case.layout.second_tier else ()
            self._arena.give_back(request.lease, tokens)
            self._evicted.add(number)
        elif action.kind == "restore":
            self._restore(number)
        else:
            assert action.draft is not None, "a switch, which names its draft"
            try:
                switched = replace(request.case, draft=action.draft)
            except Malformed:  # with such trees the twin of a fork might outgrow the pool: it keeps its draft
                return
            self._switch(request, switched)

    def _add(self, number: int) -> None:
        case = self.case.alone(number)
        self._enter(number, case, self._lease(case, case.prefix))
        if number not in self.requests and self.case.session is None:
            raise self._starvation(len(case.prompt))

    def _fork(self, source: int, twin: int) -> None:
        source_request = self.requests[source]
        try:
            case = self.case.alone(twin, tuple(source_request.tokens))
        except Malformed:  # the joined prompt is too long for the model: the twin does not enter
            return
        # None serve another adapter or other images, nor a draft that reads other hidden states.
        reads = case.draft.reads
        if (
            not self._seams.request.can_share_columns(case)
            or not self._arena.shares(source_request.lease, marks(case.model))
            or reads not in (None, source_request.case.draft.reads)
        ):
            self._enter(twin, case, self._lease(case, case.prefix))
            return
        self._enter(twin, case, self._arena.fork(source_request.lease, self._needs(case)), source_request)

    def _enter(self, number: int, case: Case, lease: CacheLease, source: Request | None = None) -> None:
        request = self._request_of(case, lease)
        if source is not None and case.draft.reads is not None:
            request.begin_with_states(source)
        if not self._room(lease, len(case.prompt)):
            self._arena.give_back(lease)
            return
        self.requests[number] = request
        self._tries.learn(number, case.draft, request.tokens)
        self._prefill(request)

    def _prefill(self, request: Request) -> None:
        """Prefill the request, or let it wait for the forwards of steps, which then hold its rows too."""
        with naming_stage(request):
            if self.case.layout.mixed_prefill and self.case.session is not None:
                request.begin_prefill()
            elif self.case.session is None:
                self.prefill_alone(request)
            else:
                request.prefill()

    def _request_of(self, case: Case, lease: CacheLease) -> Request:
        """The request of `case` on the caches `lease`, before its prefill."""
        return self._seams.request(case, self._target, lease, self._draft(case, lease), self._seams)

    def _restore(self, number: int) -> None:
        request = self.requests[number]
        lease = self._lease(request.case, tuple(request.tokens[:-1]))
        if not self._room(lease, len(request.tokens)):
            self._arena.give_back(lease)
            return
        self._evicted.discard(number)
        request.earlier_calls = request.target_calls
        request.lease = lease
        request.forget_states()
        self._resume(number, request)
        self._prefill(request)

    def _resume(self, number: int, request: Request) -> None:
        request.draft.resume(request.lease.draft)

    def _switch(self, request: Request, case: Case) -> None:
        if case.draft.reads not in (None, request.case.draft.reads):
            raise Unsupported("a switch to a draft that reads hidden states: those of earlier tokens were not kept")
        if most_rows(case.draft) >= self._rows:
            raise Unsupported(f"a switch to trees of {most_rows(case.draft)} nodes: there is room for {self._rows - 1}")
        if case.draft.reads is not None:
            request.recompute_states()  # another head begins with rows for all tokens
        needs = self._needs(case)
        if needs.draft is not request.lease.owner:
            request.lease = self._arena.with_draft(request.lease, needs)
        calls = request.draft.calls
        request.draft = self._draft(case, request.lease)
        request.case = case
        request.draft_since = request.drafted_steps
        request.draft.calls += calls  # the request's count of draft forwards goes on across drafts

    def _hand_over(self, number: int) -> None:
        """Send the request as a packet, from which it enters again; it stays where no page is free for it twice."""
        departing = self.requests[number]
        lease = self._lease(departing.case, ())
        if not self._room(lease, len(departing.tokens)):
            self._arena.give_back(lease)
            return
        with naming_stage(departing):
            departing.stage = Stage.COMMITTED
            arrived = self._seams.hand_over.unpack(self._deliver(departing, number), self._expected(departing, number))
            draft = self._draft(departing.case, lease, arrived.draft_steps)
            arriving = self._seams.request(departing.case, self._target, lease, draft, self._seams)
            arriving.bare = departing.bare
            arriving.prompt_logprobs = departing.prompt_logprobs
            arriving.carry_on(arrived, departing.steps)
        arriving.hops = departing.hops + 1
        self._arena.give_back(departing.lease)
        self.requests[number] = arriving

    def _deliver(self, request: Request, number: int) -> bytes:
        """The packet of the request where it arrives."""
        return pack(request.carried_state(), request.case, number, request.hops)

    def _expected(self, request: Request, number: int) -> ExpectedRequest:
        """The request as the receiver waits for it."""
        target_and_draft = [
            self._arena.room(model, self._capacity, self._rows, role)
            for model, role in zip(request.sends(self._target), ("target", "draft"), strict=False)
        ]
        target, draft = (*target_and_draft, None)[:2]
        assert target is not None
        return ExpectedRequest(request.case, number, request.hops, target, draft, request.hidden_width)

    def _step(self, numbers: tuple[int, ...], bare: frozenset[int] = frozenset()) -> None:
        self._poison()
        numbers = tuple(number for number in numbers if self._can_step(self.requests[number]))
        filling = [self.requests[number] for number in numbers if self.requests[number].filling]
        numbers = tuple(number for number in numbers if not self.requests[number].filling)
        batch = [self.requests[number] for number in numbers]
        if not batch and not filling:
            return
        results = self._forward(batch, self._undrafted(bare), filling)
        for request, (flat, heads) in zip(batch, results, strict=True):
            with naming_stage(request):
                request.settle(flat, heads)
        for number, request in zip(numbers, batch, strict=True):
            self._tries.learn(number, request.case.draft, request.tokens)
            if request.finish is not None:
                self._end(number)

    def _undrafted(self, numbers: frozenset[int]) -> list[Request]:
        return [self.requests[number] for number in sorted(numbers & self.requests.keys())]

    def _forward(
        self, batch: list[Request], bare: list[Request], filling: Sequence[Request] = ()
    ) -> list[tuple[Tensor, list[Tensor]]]:
        """Draft a tree for each request of `batch`, the root alone for those of `bare`, and verify them in one forward.

        The forward holds the next chunks of the prompts of `filling` too, in the lanes behind those of `batch`.

        Return for each request of `batch` the logits of the rows of all requests, and the attention outputs of its own
        by layer.
        """
        if batch:
            self._draft_trees(batch, bare)
        heads: list[Tensor] = []
        rows = [*(self._seams.gather(batch) if batch else ()), *(request.chunk_rows() for request in filling)]
        lanes = [*batch, *filling]
        # One tap for the whole batch: drafts of several requests may read different hidden states.
        reads = [request.case.draft.reads for request in lanes if request.case.draft.reads is not None]
        tap = self._seams.tap(*reads) if reads else None
        with naming_stage(lanes[0]):
            logits_by_lane = self._target.forward(
                rows, self._seams.attend, filler=self._arena.filler, lanes=self._seams.kv.lanes, watch=heads, tap=tap
            )
        # None again where the request has switched to a draft that reads none.
        states_by_lane = [
            None
            if tap is None or request.case.draft.reads is None
            else tap.states[request.case.draft.reads][lane, : len(rows[lane].tokens)]
            for lane, request in enumerate(lanes)
        ]
        for lane, request in enumerate(filling, len(batch)):
            with naming_stage(request):
                request.take_chunk(logits_by_lane[lane], states_by_lane[lane])
        if not batch:
            return []
        flat = torch.cat(logits_by_lane) if len(lanes) > 1 else logits_by_lane[0]
        blocks = [request.block for request in batch if request.block is not None]
        trees = [block.tensors for block in blocks]
        results = []
        for lane, (request, block) in enumerate(zip(batch, blocks, strict=True)):
            block.index = self._seams.retrieve(trees, lane)
            request.verify_states = states_by_lane[lane]
            results.append((flat, [outputs[lane, :, : len(rows[lane].tokens)] for outputs in heads]))
        return decide_together(batch, results, naming_stage)

    def _draft_trees(self, batch: list[Request], bare: list[Request]) -> None:
        """Draft a tree for each request of `batch`; those of `bare` take the root alone."""
        self._batch_size = self._drafted_batch_size(batch)
        drafting = [request for request in batch if request not in bare]
        for request in batch:  # drafts run one by one, the verify forward not
            with naming_stage(request):
                if request in bare:
                    request.propose_root()
                elif self._levels is None:
                    request.propose()
        if drafting and self._levels is not None:
            draft_together(drafting, self._levels, naming_stage)

    def _drafted_batch_size(self, batch: list[Request]) -> int:
        """The number of requests of `batch`; for a case without a session, the number that its draft tells."""
        table = self.case.draft.dispatch
        if table is None or not table.batches:  # a session tells no numbers
            return len(batch)
        return table.batches[min(batch[0].coined_steps, len(table.batches) - 1)]

    def _can_step(self, request: Request) -> bool:
        """Whether the pool has pages for the request's next block; if not, the request waits, before any forward.

        Raises:
            StageFailure: if the request is alone, so that no other gives pages back, however long it waits.
        """
        if request.filling:  # it took the pages of its prompt when it entered
            return True
        columns = len(request.tokens) + self._rows
        room = self._room(request.lease, columns)
        if not room and self.case.session is None:
            raise self._starvation(columns)
        return room

    def _starvation(self, columns: int) -> StageFailure:
        """The error of a request alone that waits for pages."""
        free, total = len(self._arena.pages.free), self._arena.pages.total
        return StageFailure(
            Stage.COMMITTED,
            f"the request waits for pages that can never come: {columns} columns and their reserve need "
            f"{self.case.layout.pages_for(columns)} of {total} pages, {free} are free, and no other request holds any",
        )

    def _room(self, lease: CacheLease, columns: int) -> bool:
        """Whether there is a slot for its recurrent states and room for `columns` columns, whose pages are reserved."""
        if not self._arena.has_slot(lease):
            return False
        try:
            for blocks, committed in lease.tables:
                blocks.reserve(columns)
                blocks.copy_on_write(committed, columns)
        except OutOfPages:
            return False
        return True

    def _end(self, number: int) -> None:
        request = self.requests[number]
        self._ended.add(number)
        if number in self._evicted:  # its caches went back when it was evicted
            self._evicted.discard(number)
        else:
            self._arena.give_back(request.lease, request.keepable_tokens)

    def _poison(self) -> None:
        self._arena.poison([self.requests[number].lease for number in sorted(self.living)])

    def _lease(self, case: Case, tokens: tuple[int, ...]) -> CacheLease:
        """Caches that begin with known pages of `tokens`."""
        shared_tokens = tokens if self._seams.request.can_share_columns(case) else ()
        return self._arena.lease(self._needs(case, shared_tokens))

    def _needs(self, case: Case, tokens: tuple[int, ...] = ()) -> CacheNeeds:
        draft = self._models.draft(case, self._seams)
        states = state_needs(case, int(self._target.model.config.hidden_size))
        return CacheNeeds(self._target, draft, self._capacity, self._rows, tokens, marks(case.model), states)

    def _draft(self, case: Case, lease: CacheLease, draft_steps: int = 0) -> Draft:
        model = self._models.draft(case, self._seams)
        assert not isinstance(model, AbsentModel), "`RankServer` opens no draft on a rank without it"
        trie = self._tries.trie_of(case.draft)
        draft = open_draft(
            Opening(case, model, lease.draft, self._seams, self._target, lambda: self._batch_size, trie, draft_steps)
        )
        if draft.reads != case.draft.reads:
            raise Unsupported(
                f"the draft reads {draft.reads or 'no hidden states'}, and the case gives it "
                f"{case.draft.reads or 'no hidden states'}"
            )
        return draft

    @property
    def trace(self) -> Trace:
        """The trace of request 0 so far; with a session, the traces of all requests in `shared`."""
        trace = self.requests[0].trace if 0 in self.requests else Trace((), (), None)
        trace = self._models.with_counters(trace)
        if self.case.session is None:
            return trace
        numbers = range(1 + len(self.session.mates))
        traces = tuple(self.requests[number].trace if number in self.requests else None for number in numbers)
        prompts = tuple(
            self.requests[number].case.prompt if request_trace else () for number, request_trace in enumerate(traces)
        )
        return replace(trace, shared=Shared(traces, prompts, tuple(self.accounts)))

    def _account(self) -> Account:
        """The state of the page pools, and the columns of the living requests."""
        arena = self._arena
        leases = {number: self.requests[number].lease for number in sorted(self.living)}
        tables = {number: lease.blocks for number, lease in leases.items() if lease.blocks is not None}
        lengths = {number: lease.target.length for number, lease in leases.items()}
        account = replace(
            account_of(arena.pages, arena.prefix, tables, lengths),
            slots={number: lease.slot for number, lease in leases.items() if lease.slot is not None},
            free_slots=arena.slots.free,
        )
        if arena.draft_pages is arena.pages:
            return account
        draft_tables = {
            number: lease.draft_blocks for number, lease in leases.items() if lease.draft_blocks is not None
        }
        draft_lengths = {
            number: lease.draft.length
            for number, lease in leases.items()
            if lease.draft is not None and lease.draft_blocks is not None
        }
        return replace(account, draft=account_of(arena.draft_pages, arena.draft_prefix, draft_tables, draft_lengths))


def account_of(pages: Pages, prefix: PrefixCache | None, tables: dict[int, Blocks], lengths: dict[int, int]) -> Account:
    """The state of the pool of `pages`; the tables and committed columns of requests by number."""
    tier = None if prefix is None else prefix.tier
    return Account(
        free=pages.free,
        total=pages.total,
        tables={number: tuple(blocks.table) for number, blocks in tables.items()},
        kept=prefix.cached_pages if prefix is not None else (),
        committed=lengths,
        allocated={number: blocks.allocated for number, blocks in tables.items()},
        stored=0 if tier is None else len(tier.slots),
        brought=() if tier is None else tier.take_brought(),
    )
