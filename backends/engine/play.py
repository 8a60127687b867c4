"""The playing of a case on a server: a session's actions, or one request's steps."""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from specverify.backends.engine.model.models import ModelCache
from specverify.backends.engine.overlap_server import OverlapServer
from specverify.backends.engine.request import Request
from specverify.backends.engine.seams import Seams
from specverify.backends.engine.server import Server
from specverify.reference.case import Case
from specverify.reference.session import Action, Session
from specverify.reference.trace import Trace


class Plays(Protocol):
    """A server, or the servers of several ranks."""

    def do(self, action: Action) -> None:
        """See `Server.do`."""
        ...

    @property
    def living(self) -> set[int]:
        """See `Server.living`."""
        ...


def serve(case: Case, shelf: ModelCache, seams: Seams) -> Server:
    """Return a server that has played the actions of the case's session and accepts further actions.

    The server has room for forks at any time, and for trees as large as the largest tree that the session names.

    Raises:
        StageFailure, Unsupported: as `play`.
    """
    # An empty session in place of None, so that the trace shows every request and its account.
    server = OverlapServer(case if case.session is not None else replace(case, session=Session()), shelf, seams)
    for action in server.session.actions:
        server.do(action)
    return server


def play(case: Case, shelf: ModelCache, seams: Seams, prefill: Callable[[Request], None] | None = None) -> Trace:
    """Run `case` and return its trace.

    With a session, the session's actions are played. Without one, request 0 is prefilled by `prefill`, or by itself,
    and takes steps until it stops or until `case.steps` steps are done.

    Raises:
        StageFailure: for every error on the way, with the stage in which it occurred.
        Unsupported: for a model that the engine cannot run under this case.
    """
    if case.session is not None:
        return serve(case, shelf, seams).trace
    server = Server(case, shelf, seams)
    if prefill is not None:
        server.prefill_alone = prefill
    play_alone(case, server)
    return server.trace


def play_alone(case: Case, server: Plays) -> None:
    """Let request 0 of a case without a session take its steps on `server`."""
    server.do(Action("add", (0,)))
    steps = 0
    while 0 in server.living and (not case.steps or steps < case.steps):
        server.do(Action("step", (0,)))
        steps += 1
