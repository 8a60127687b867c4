"""Plays cases on a server: the actions of a session, or the steps of one request alone."""

from dataclasses import replace

from backends.engine.model.models import ModelCache
from backends.engine.seams import Seams
from backends.engine.server import Server
from reference.case import Case
from reference.session import Action, Session
from reference.trace import Trace


def serve(case: Case, shelf: ModelCache, seams: Seams) -> Server:
    """A server on which the actions of the case's session are played, and more may come.

    It has room for forks at any time, and for trees as large as the largest that the session names.

    Raises:
        StageFailure, Unsupported: as `play`.
    """
    server = Server(case if case.session is not None else replace(case, session=Session()), shelf, seams)
    for action in server.session.actions:
        server.do(action)
    return server


def play(case: Case, shelf: ModelCache, seams: Seams) -> Trace:
    """The trace of `case`: its session's actions, or its own request alone until a stop or the end of its steps.

    Raises:
        StageFailure: for whatever breaks on the way, with the stage in which it broke.
        Unsupported: for a model that cannot be run so.
    """
    if case.session is not None:
        return serve(case, shelf, seams).trace
    server = Server(case, shelf, seams)
    server.do(Action("add", (0,)))
    taken = 0
    while 0 in server.living and (not case.steps or taken < case.steps):
        server.do(Action("step", (0,)))
        taken += 1
    return server.trace
