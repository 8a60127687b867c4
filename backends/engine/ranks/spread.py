"""Data parallelism: ranks with the whole target share out a session's requests.

Before a step the ranks tell each other their rows, and behind its forward the accepted lengths, as engines do whose
experts are spread over ranks. A rank without a request for a step steps along with no rows, so that all enter the same
collectives however unequal their requests are.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from backends.engine.ahead.server import OverlapServer
from backends.engine.collectives.group import Group
from backends.engine.model.models import ModelCache
from backends.engine.seams import Seams
from backends.engine.step.naming import naming
from reference.case import Case
from reference.parallel.ranks import RankRun
from reference.parallel.spread import owners
from reference.session import Account, Action
from reference.trace import Trace


class SpreadServer(OverlapServer):
    """The server of one rank, which plays its own requests and steps along for those of others."""

    def __init__(self, case: Case, shelf: ModelCache, seams: Seams, group: Group) -> None:
        super().__init__(case, shelf, seams)
        self._group = group
        self._owners = owners(case.session, case.ranks)

    def _possible(self, action: Action) -> tuple[int, ...]:
        mine = [one for one in action.requests if self._owners[one] == self._group.rank]
        if len(mine) < len(action.requests) and action.kind == "fork":
            return ()
        return super()._possible(replace(action, requests=tuple(mine))) if mine else ()

    def _step(self, numbers: tuple[int, ...], bare: bool = False) -> None:
        self._poison()
        numbers = tuple(number for number in numbers if self._ready(self.requests[number]))
        batch = [self.requests[number] for number in numbers]
        if not any(int(one) for one in self._group.all_gather(torch.tensor([len(batch)]))):
            return
        outcomes = []
        for request, (flat, heads) in zip(batch, self._forward(batch, bare) if batch else (), strict=True):
            with naming(request):
                verdict = request.accept(flat, heads)
                outcomes.append((verdict, request.emit(verdict)))
        own = torch.zeros(len(self._owners), dtype=torch.int64)
        for number, (_, emission) in zip(numbers, outcomes, strict=True):
            own[number] = len(emission.tokens)
        lengths = self._seams.sampling.ranks.lengths(self._group, own)
        for number, request, (verdict, emission) in zip(numbers, batch, outcomes, strict=True):
            with naming(request):
                committed = request.commit(verdict, verdict.path[: int(lengths[number])])
                request.record(verdict, emission, committed)
            self._tries.learn(number, request.case.draft, request.tokens)
            if request.finish is not None:
                self._end(number)

    def alone(self) -> None:
        """Play a case without a session: the rank of request 0 takes its steps, and the others step along."""
        self.do(Action("add", (0,)))
        taken = 0
        while any(int(one) for one in self._group.all_gather(torch.tensor([int(0 in self.living)]))):
            if self.case.steps and taken == self.case.steps:
                return
            self.do(Action("step", (0,)))
            taken += 1


def spread(case: Case, traces: Sequence[Trace], calls: Sequence[tuple[str, ...]]) -> Trace:
    """The trace of all requests, each as its own rank has it; a rank's record holds its collectives alone."""
    own = owners(case.session, case.ranks)
    runs = tuple(RankRun((), (), one) for one in calls)
    first = replace(
        traces[own[0]],
        ranks=runs,
        forward_s=sum(one.forward_s for one in traces),
        attention_calls=sum(one.attention_calls for one in traces),
    )
    every = [one.shared for one in traces if one.shared is not None]
    if not every:
        return first
    requests = [every[rank].requests[number] for number, rank in enumerate(own)]
    shared = replace(
        every[0],
        requests=tuple(None if one is None else replace(one, ranks=runs) for one in requests),
        prompts=tuple(every[rank].prompts[number] for number, rank in enumerate(own)),
        accounts=tuple(_joined(some) for some in zip(*(one.accounts for one in every), strict=False)),
    )
    return replace(first, shared=shared)


def _joined(accounts: Sequence[Account]) -> Account:
    """The account of all ranks; the pages of each are numbered on from those of the rank before it."""
    total, free, kept = 0, list[int](), list[int]()
    tables: dict[int, tuple[int, ...]] = {}
    committed: dict[int, int] = {}
    allocated: dict[int, int] = {}
    for one in accounts:
        free += [page + total for page in one.free]
        kept += [page + total for page in one.kept]
        tables |= {number: tuple(page + total for page in table) for number, table in one.tables.items()}
        committed |= one.committed
        allocated |= one.allocated
        total += one.total
    return Account(tuple(free), total, tables, tuple(kept), committed, allocated)
