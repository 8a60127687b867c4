"""Data parallelism: ranks with the whole target share out a session's requests.

Before a step the ranks tell each other their rows, and behind its forward the accepted lengths, as engines do whose
experts are spread over ranks. A rank without a request for a step steps along with no rows, so that all enter the same
collectives however unequal their requests are.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from specverify.backends.engine.collectives import Group
from specverify.backends.engine.model.models import ModelCache
from specverify.backends.engine.overlap_server import OverlapServer
from specverify.backends.engine.seams import Seams
from specverify.backends.engine.step.naming import naming_stage
from specverify.reference.case import Case
from specverify.reference.parallel import RankRun, owners
from specverify.reference.session import Account, Action
from specverify.reference.trace import Trace


class SpreadServer(OverlapServer):
    """The server of one rank, which plays its own requests and steps along for those of others."""

    def __init__(self, case: Case, shelf: ModelCache, seams: Seams, group: Group) -> None:
        super().__init__(case, shelf, seams)
        self._group = group
        self._owners = owners(case.session, case.ranks)

    def _admitted(self, action: Action) -> tuple[int, ...]:
        numbers = [number for number in action.requests if self._owners[number] == self._group.rank]
        if len(numbers) < len(action.requests) and action.kind == "fork":
            return ()
        return super()._admitted(replace(action, requests=tuple(numbers), bare=())) if numbers else ()

    def _step(self, numbers: tuple[int, ...], bare: frozenset[int] = frozenset()) -> None:
        self._poison()
        numbers = tuple(number for number in numbers if self._can_step(self.requests[number]))
        filling = [self.requests[number] for number in numbers if self.requests[number].filling]
        numbers = tuple(number for number in numbers if not self.requests[number].filling)
        batch = [self.requests[number] for number in numbers]
        batch_sizes = self._group.all_gather(torch.tensor([len(batch)]))
        results = self._forward(batch, self._undrafted(bare), filling) if batch or filling else []
        if not any(int(batch_size) for batch_size in batch_sizes):
            return
        outcomes = []
        for request, (flat, heads) in zip(batch, results, strict=True):
            with naming_stage(request):
                verdict = request.accept(flat, heads)
                outcomes.append((verdict, request.emit(verdict)))
        own_lengths = torch.zeros(len(self._owners), dtype=torch.int64)
        for number, (_, emission) in zip(numbers, outcomes, strict=True):
            own_lengths[number] = len(emission.tokens)
        lengths = self._seams.sampling.ranks.lengths(self._group, own_lengths)
        for number, request, (verdict, emission) in zip(numbers, batch, outcomes, strict=True):
            with naming_stage(request):
                committed = request.commit(verdict, verdict.path[: int(lengths[number])])
                request.record(verdict, emission, committed)
            self._tries.learn(number, request.case.draft, request.tokens)
            if request.finish is not None:
                self._end(number)

    def alone(self) -> None:
        """Play a case without a session: the rank of request 0 takes its steps, and the others step along."""
        self.do(Action("add", (0,)))
        steps = 0
        while any(int(is_living) for is_living in self._group.all_gather(torch.tensor([int(0 in self.living)]))):
            if self.case.steps and steps == self.case.steps:
                return
            self.do(Action("step", (0,)))
            steps += 1


def merge_spread(case: Case, traces: Sequence[Trace], calls: Sequence[tuple[str, ...]]) -> Trace:
    """The trace of all requests, each as its own rank has it; a rank's record holds its collectives alone."""
    owner_ranks = owners(case.session, case.ranks)
    runs = tuple(RankRun((), (), rank_calls) for rank_calls in calls)
    first = replace(
        traces[owner_ranks[0]],
        ranks=runs,
        forward_s=sum(trace.forward_s for trace in traces),
        attention_calls=sum(trace.attention_calls for trace in traces),
    )
    shared_traces = [trace.shared for trace in traces if trace.shared is not None]
    if not shared_traces:
        return first
    requests = [shared_traces[rank].requests[number] for number, rank in enumerate(owner_ranks)]
    shared = replace(
        shared_traces[0],
        requests=tuple(None if request is None else replace(request, ranks=runs) for request in requests),
        prompts=tuple(shared_traces[rank].prompts[number] for number, rank in enumerate(owner_ranks)),
        accounts=tuple(
            _join_accounts(accounts)
            for accounts in zip(*(shared_trace.accounts for shared_trace in shared_traces), strict=False)
        ),
    )
    return replace(first, shared=shared)


def _join_accounts(accounts: Sequence[Account]) -> Account:
    """The account of all ranks; the pages of each are numbered on from those of the rank before it."""
    total = 0
    free = list[int]()
    cached = list[int]()
    tables: dict[int, tuple[int, ...]] = {}
    committed: dict[int, int] = {}
    allocated: dict[int, int] = {}
    for account in accounts:
        free += [page + total for page in account.free]
        cached += [page + total for page in account.kept]
        tables |= {number: tuple(page + total for page in table) for number, table in account.tables.items()}
        committed |= account.committed
        allocated |= account.allocated
        total += account.total
    drafts = [account.draft for account in accounts if account.draft is not None]
    draft = _join_accounts(drafts) if drafts else None
    return Account(tuple(free), total, tables, tuple(cached), committed, allocated, draft=draft)
