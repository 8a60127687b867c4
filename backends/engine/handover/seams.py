"""The seams of a hand-over: the functions that a planted fault may replace."""

from collections.abc import Callable
from dataclasses import dataclass

from backends.engine.guided.guide import Guide
from backends.engine.handover import packet, state
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
        packed: From the state, the request's case, its number and earlier hand-overs to the packet.
        unpacked: From a packet and the request that is expected to the state.
        read_again: Reads the output in the grammar, from its beginning.
        fill: Commits columns in an empty cache.
    """

    leaves: Callable[[Carried], Carried] = leaves
    packed: Callable[[Carried, Case, int, int], bytes] = packet.packed
    unpacked: Callable[[bytes, Expected], Carried] = packet.unpacked
    read_again: Callable[[Guide, list[int]], None] = read_again
    fill: Callable[[KvCache, Columns], None] = state.fill
