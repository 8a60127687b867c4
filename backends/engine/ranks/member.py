"""The process of one rank, which answers what the crew asks of all ranks."""

import sys
from collections.abc import Callable, Mapping, MutableSequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing.connection import Connection
from typing import Any

import torch

from specverify.backends.base import StageFailure, Unsupported
from specverify.backends.engine.collectives import OutOfStep, take_device
from specverify.backends.engine.model.models import ModelCache
from specverify.backends.engine.play import play_alone
from specverify.backends.engine.ranks.in_step import sampling_in_step, seams_in_step
from specverify.backends.engine.ranks.play import RankServer, is_out_of_step
from specverify.backends.engine.ranks.processes import TRANSPORTS, ProcessGroup, join
from specverify.backends.engine.ranks.spread import SpreadServer
from specverify.backends.engine.sampling.rounds import Tables
from specverify.backends.engine.seams import Seams
from specverify.backends.flags import flags_set
from specverify.reference.case import Case
from specverify.reference.session import Action
from specverify.reference.trace import Trace

Facts = Mapping[str, str]
"""Versions and flags of a rank, which are to be those of rank 0."""


@dataclass(frozen=True)
class Membership:
    """A rank of a crew.

    Attributes:
        rank: Its number.
        size: The number of ranks.
        place: The file at which the processes meet.
        seconds: After so many seconds in one collective the transport gives up.
        entered: See `ProcessGroup`.
        seams: The seams of the whole engine.
        transport: One of TRANSPORTS.
        facts: Tells the versions and flags of a rank.
    """

    rank: int
    size: int
    place: str
    seconds: float
    entered: MutableSequence[int]
    seams: Seams
    transport: str
    facts: Callable[[int], Facts]


def facts_of(rank: int) -> Facts:
    """The versions and flags of this process, whatever its rank."""
    packages = {name: version(name) for name in ("torch", "transformers", "numpy")}
    return {"python": sys.version.split()[0], **packages, **flags_set()}


class Player:
    """The server of one rank of a case; once the ranks are out of step it plays no further action."""

    def __init__(self, case: Case, shelf: ModelCache, seams: Seams, group: ProcessGroup) -> None:
        self._group = group
        self.server: RankServer | SpreadServer = (
            SpreadServer(case, shelf, seams, group)
            if case.spread
            else RankServer(case, shelf, seams_in_step(seams, group, case.draft_ranks), group.rank)
        )

    def do(self, action: Action) -> None:
        """See `Server.do`."""
        if self._group.parted is not None:
            return
        try:
            self.server.do(action)
        except Exception as error:
            if not is_out_of_step(error):
                raise

    @property
    def living(self) -> set[int]:
        """The requests that can take a step; none where the ranks are out of step."""
        return set() if self._group.parted is not None else self.server.living


def run_rank(membership: Membership, wire: Connection, foreign: list[Connection]) -> None:
    """Be a rank until the crew closes the wire; `foreign` are ends of wires that a fork has brought along."""
    for connection in foreign:
        connection.close()
    # A fork must not use threads of a pool that its parent began.
    torch.set_num_threads(1)
    wire.send(("hello", membership.facts(membership.rank)))
    device = take_device(TRANSPORTS[membership.transport], membership.rank)
    shelf = ModelCache(device)
    with suppress(EOFError, OSError):  # the crew is gone
        if wire.recv() != "join":
            return
        join(membership.rank, membership.size, membership.place, membership.seconds, membership.transport)
        while True:
            word, *arguments = wire.recv()
            group = ProcessGroup(membership.rank, membership.size, membership.entered, device)
            wire.send(_answer(membership.seams, shelf, group, word, arguments))


def _answer(seams: Seams, shelf: ModelCache, group: ProcessGroup, word: str, arguments: list[Any]) -> tuple[Any, ...]:
    """The answer to one request: what was asked for, or the exception."""
    try:
        result = (
            _play_case(arguments[0], seams, shelf, group)
            if word == "run"
            else _answer_by_tables(word, arguments, seams, group)
        )
        answer: tuple[Any, ...] = ("told", result)
    except Exception as error:  # it belongs to the crew, which sees all ranks
        answer = _failure(error)
    # The others may be still at work; the record of the collectives says so.
    with suppress(OutOfStep):
        group.close()
    return answer


def _failure(error: Exception) -> tuple[Any, ...]:
    """A word for the kind of failure, and what a crew needs to raise it again."""
    if any(name in str(error) for name in ("gloo", "Connection closed by peer", "ProcessGroup", "NCCL", "HCCL")):
        return "lost", " ".join(str(error).split())[:160]
    if is_out_of_step(error):
        return "parted", str(error)
    if isinstance(error, StageFailure):
        return "stopped", (error.stage, error.why)
    if isinstance(error, Unsupported):
        return "unsupported", str(error)
    return "raised", f"{type(error).__name__}: {error}"


def _play_case(case: Case, seams: Seams, shelf: ModelCache, group: ProcessGroup) -> tuple[Trace, tuple[str, ...], int]:
    """The trace of this rank, its collectives, and the number of KV heads of the whole model."""
    player = Player(case, shelf, seams, group)
    server = player.server
    if case.session is None and isinstance(server, SpreadServer):
        with suppress(OutOfStep):
            server.alone()
    elif case.session is None:
        play_alone(case, player)
    else:
        for action in case.session.actions:
            player.do(action)
    return server.trace, tuple(group.calls), server.whole_kv_heads if isinstance(server, RankServer) else 0


def _answer_by_tables(word: str, arguments: list[Any], seams: Seams, group: ProcessGroup) -> Any:
    """The blocks of a method of `Tables`."""
    tables = Tables("cpu", lambda: sampling_in_step(seams.sampling, group))
    return getattr(tables, word)(*arguments)
