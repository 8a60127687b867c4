"""The seams of a hand-over: the functions that a planted fault may replace."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from backends.engine.guided.guide import Guide
from backends.engine.handover import items, packet, state
from backends.engine.handover.items import Item
from backends.engine.handover.packet import Expected
from backends.engine.handover.state import Carried, Columns
from backends.engine.kv.base import KvCache
from reference.case import Case


def leaves(carried: Carried) -> Carried:
    """All of the state is sent."""
    return carried


def read_again(guide: Guide, output: list[int]) -> None:
    """Read the tokens of `output`, each once, in a guide at the beginning of its grammar."""
    for token in output:
        guide.goes_on(token)


@dataclass(frozen=True)
class HandOverSeams:
    """The functions of a hand-over; the defaults are the fault-free engine.

    Attributes:
        leaves: From the state of a request to the state that is sent.
        mixed: From the items of a packet to the order in which they are posted.
        arrived: Whether the receiver may begin, from the names of the items that came and of all items.
        joined: From the items, as they came, to the packet.
        packed: From the state, the request's case, its number and earlier hand-overs to the packet.
        unpacked: From a packet and the request that is expected to the state.
        read_again: Reads the output in the grammar, from its beginning.
        fill: Commits columns in an empty cache.
    """

    leaves: Callable[[Carried], Carried] = leaves
    packed: Callable[[Carried, Case, int, int], bytes] = packet.packed
    unpacked: Callable[[bytes, Expected], Carried] = packet.unpacked
    mixed: Callable[[Sequence[Item]], list[Item]] = items.mixed
    arrived: Callable[[Collection[str], Collection[str]], bool] = items.arrived
    joined: Callable[[Sequence[Item]], bytes] = items.joined
    read_again: Callable[[Guide, list[int]], None] = read_again
    fill: Callable[[KvCache, Columns], None] = state.fill
