"""The passing of a request: its packet on the sender's side, and what the receiver expects of it."""

from collections.abc import Sequence

from backends.engine.handover.carrying import Carrying
from backends.engine.handover.packet import Expected
from backends.engine.handover.seams import HandOverSeams
from backends.engine.handover.state import Carried
from backends.engine.kv.base import CacheSpec


def expected(request: Carrying, number: int, rooms: Sequence[CacheSpec]) -> Expected:
    """The request that a receiver waits for.

    Args:
        request: The request, at the sender or made anew at the receiver.
        number: Its number in the session.
        rooms: The sizes of its target's cache, and of its draft's where keys and values of a draft are sent.
    """
    target, draft = (*rooms, None)[:2]
    assert target is not None
    return Expected(request.case, number, request.hops, target, draft, request.hidden_width)


def passed(request: Carrying, number: int, rooms: Sequence[CacheSpec], over: HandOverSeams) -> Carried:
    """The state of `request` after it was bytes; arguments as of `expected`.

    Raises:
        BadHandOver: The packet is not what the receiver expects.
    """
    data = over.packed(over.leaves(request.carried()), request.case, number, request.hops)
    return over.unpacked(data, expected(request, number, rooms))
