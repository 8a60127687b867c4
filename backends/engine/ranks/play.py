"""The playing of a case on ranks that are threads.

Every rank has a server, with its part of target and caches or with its part of the requests.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from specverify.backends.base import Unsupported
from specverify.backends.engine.collectives import Group, OutOfStep
from specverify.backends.engine.draft import Draft
from specverify.backends.engine.draft.followed import FollowedDraft
from specverify.backends.engine.kv.arena import CacheLease, CacheNeeds
from specverify.backends.engine.model.models import ModelCache
from specverify.backends.engine.overlap_server import OverlapServer
from specverify.backends.engine.play import play_alone
from specverify.backends.engine.ranks.in_step import seams_in_step
from specverify.backends.engine.ranks.merged import merge_traces
from specverify.backends.engine.ranks.shards import ShardedLm
from specverify.backends.engine.ranks.spread import SpreadServer, merge_spread
from specverify.backends.engine.ranks.threads import Meeting
from specverify.backends.engine.seams import Seams
from specverify.reference.case import Case
from specverify.reference.session import Action, Session
from specverify.reference.trace import Trace

Result = TypeVar("Result")


class RankServer(OverlapServer):
    """The server of rank `rank`.

    Raises:
        Unsupported: The prefix cache would keep recurrent states of a draft that not all ranks have.
    """

    def __init__(self, case: Case, shelf: ModelCache, seams: Seams, rank: int) -> None:
        self._rank = rank
        super().__init__(case, shelf, seams)

    def _needs(self, case: Case, tokens: tuple[int, ...] = ()) -> CacheNeeds:
        needs = super()._needs(case, tokens)
        is_kept = self.case.draft_ranks and self.case.layout.traits.keeps_prefixes
        if is_kept and needs.draft is not None and needs.draft.room(0, 0).recurrent:
            raise Unsupported("a prefix cache with recurrent states of a draft on ranks of its own")
        return needs

    def _draft(self, case: Case, lease: CacheLease, draft_steps: int = 0) -> Draft:
        if self._rank < case.drafting_ranks:
            return super()._draft(case, lease, draft_steps)
        zero = torch.zeros((), dtype=self._target.dtype, device=self._target.device)
        return FollowedDraft(case.draft.reads, lease.draft, zero)

    @property
    def whole_kv_heads(self) -> int:
        """The number of KV heads of the whole target."""
        assert isinstance(self._target, ShardedLm)
        return self._target.whole_kv_heads


class RankedServers:
    """The servers of all ranks of a case; each action is played on all of them.

    Once the ranks are out of step no further action is played, so that the trace shows the ranks as they parted.
    """

    def __init__(self, case: Case, shelf: ModelCache, seams: Seams) -> None:
        self._meeting = Meeting(case.ranks)

        def open_server(group: Group) -> OverlapServer:
            if case.spread:
                return SpreadServer(case, shelf, seams, group)
            return RankServer(case, shelf, seams_in_step(seams, group, case.draft_ranks), group.rank)

        self._case = case
        self._servers = self._all(open_server)

    def _all(self, work: Callable[[Group], Result]) -> list[Result]:
        """The results of `work` on each rank.

        Raises:
            Exception: That of the first rank whose own work failed, before any that failed for want of others.
        """
        outcomes = self._meeting.run(work)
        errors = [outcome.error for outcome in outcomes if outcome.error is not None]
        own_errors = [error for error in errors if not is_out_of_step(error)]
        if own_errors:
            raise own_errors[0]
        return [outcome.value for outcome in outcomes if outcome.error is None]

    def do(self, action: Action) -> None:
        """Apply `action` on all ranks; see `Server.do`."""
        if self._meeting.parted is None:
            self._all(lambda group: self._servers[group.rank].do(action))

    @property
    def living(self) -> set[int]:
        """The requests that can take a step; none where the ranks are out of step."""
        if self._meeting.parted is not None:
            return set()
        servers = self._servers if self._case.spread else self._servers[:1]
        return set().union(*(server.living for server in servers))

    def alone(self) -> None:
        """Let request 0 of a case without a session take its steps."""
        if self._case.spread:
            self._all(lambda group: self._spread(group.rank).alone())
        else:
            play_alone(self._case, self)

    def _spread(self, rank: int) -> SpreadServer:
        server = self._servers[rank]
        assert isinstance(server, SpreadServer)
        return server

    @property
    def trace(self) -> Trace:
        """The trace of rank 0 so far, with the heads and the runs of all ranks; of spread requests, those of all."""
        calls = [tuple(group.calls) for group in self._meeting.groups]
        traces = [server.trace for server in self._servers]
        first = self._servers[0]
        if isinstance(first, RankServer):
            return merge_traces(traces, calls, first.whole_kv_heads, self._case)
        return merge_spread(self._case, traces, calls)


def is_out_of_step(error: BaseException) -> bool:
    """Whether an exception says that ranks have parted, and not that this rank's own work failed."""
    return isinstance(error, OutOfStep) or isinstance(error.__cause__, OutOfStep)


def serve_ranks(case: Case, shelf: ModelCache, seams: Seams) -> RankedServers:
    """As `specverify.backends.engine.play.serve`, on as many ranks as the case names."""
    case_with_session = case if case.session is not None else replace(case, session=Session())
    servers = RankedServers(case_with_session, shelf, seams)
    for action in (case_with_session.session or Session()).actions:
        servers.do(action)
    return servers


def play_ranks(case: Case, shelf: ModelCache, seams: Seams) -> Trace:
    """As `specverify.backends.engine.play.play`, on as many ranks as the case names."""
    if case.session is not None:
        return serve_ranks(case, shelf, seams).trace
    servers = RankedServers(case, shelf, seams)
    servers.alone()
    return servers.trace
