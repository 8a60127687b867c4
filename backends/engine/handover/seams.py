"""The seams of a hand-over: the functions that a planted fault may replace."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from specverify.backends.engine.guided.guide import Guide
from specverify.backends.engine.handover import items, packet, state
from specverify.backends.engine.handover.items import Item
from specverify.backends.engine.handover.packet import ExpectedRequest
from specverify.backends.engine.handover.state import Columns, RequestState
from specverify.backends.engine.kv.base import KvCache
from specverify.reference.case import Case


def outgoing(state: RequestState) -> RequestState:
    """All of the state is sent."""
    return state


def read_again(guide: Guide, output: list[int]) -> None:
    """Read the tokens of `output`, each once, in a guide at the beginning of its grammar."""
    for token in output:
        guide.accept_token(token)


@dataclass(frozen=True)
class HandOverSeams:
    """The functions of a hand-over; the defaults are the fault-free engine.

    Attributes:
        outgoing: From the state of a request to the state that is sent.
        shuffle: From the items of a packet to the order in which they are posted.
        is_complete: Whether the receiver may begin, from the names of the items that came and of all items.
        join: From the items, as they came, to the packet.
        pack: From the state, the request's case, its number and earlier hand-overs to the packet.
        unpack: From a packet and the request that is expected to the state.
        read_again: Reads the output in the grammar, from its beginning.
        fill: Commits columns in an empty cache.
    """

    outgoing: Callable[[RequestState], RequestState] = outgoing
    pack: Callable[[RequestState, Case, int, int], bytes] = packet.pack
    unpack: Callable[[bytes, ExpectedRequest], RequestState] = packet.unpack
    shuffle: Callable[[Sequence[Item]], list[Item]] = items.shuffle
    is_complete: Callable[[Collection[str], Collection[str]], bool] = items.is_complete
    join: Callable[[Sequence[Item]], bytes] = items.join
    read_again: Callable[[Guide, list[int]], None] = read_again
    fill: Callable[[KvCache, Columns], None] = state.fill
