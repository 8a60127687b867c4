"""Faults of a hand-over between two processes.

The decode begins too early, with parts in the wrong order, or with a packet that it has used before.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from specverify.backends.engine.handover.items import Item, join_in_order, page_of
from specverify.backends.engine.handover.mailbox import HandOver
from specverify.backends.engine.handover.packet import ExpectedRequest
from specverify.backends.engine.handover.state import RequestState
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import committed_fault, drafted_fault, in_place_of

ON = "cpu-handed-over"


def _pages(items: Sequence[Item]) -> list[Item]:
    return [item for item in items if page_of(item.name) >= 0]


@committed_fault(
    "decode-before-last-item",
    "family of vllm-project/vllm #46694: decode begins while a block is still on its way",
    "a request that is handed over with columns in several KV pages, and then steps",
    on=ON,
)
def before_last(seams: Seams) -> Seams:
    """The decode begins when all items but one KV page are there; the columns of that page are zeros."""

    class BeforeLast(HandOver):
        def is_complete(self, arrived_names: Collection[str], names: Collection[str]) -> bool:
            lacking = set(names) - set(arrived_names)
            pages = [name for name in arrived_names if page_of(name) >= 0]
            return not lacking or (len(lacking) == 1 and page_of(*lacking) >= 0 and bool(pages))

        def join(self, items: Sequence[Item]) -> bytes:
            lacking = set(items[0].names) - {item.name for item in items}
            return super().join([*items, *(_empty(name, items) for name in lacking)])

    return replace(seams, hand_over=BeforeLast())


def _empty(name: str, items: Sequence[Item]) -> Item:
    """The KV page `name` as it was allocated: zeros, of the width of the columns that the others leave open."""
    role = name.split(".")[0]
    facts = next(item for item in items if item.name == "positions").facts[role]
    pages = [item for item in _pages(items) if item.name.startswith(f"{role}.")]
    tensors = {}
    for tensor in sorted({name for item in pages for name in item.tensors}):
        parts = [item.tensors[tensor] for item in pages if tensor in item.tensors]
        columns = facts["length"] - facts["first"][int(tensor.rsplit(".", 1)[1])]
        open_columns = columns - sum(part.shape[1] for part in parts)
        tensors[tensor] = torch.zeros_like(parts[0][:, :1]).expand(-1, open_columns, -1)
    return replace(items[0], name=name, facts={}, tensors=tensors)


@committed_fault(
    "items-joined-as-they-come",
    "family of vllm-project/vllm #46694: blocks of the sender are taken for those of the receiver in another order",
    "a request that is handed over with columns in several KV pages, and then steps",
    on=ON,
)
@in_place_of("hand_over.join")
def as_they_come(hand_over: HandOver, items: Sequence[Item]) -> bytes:
    """The columns of KV pages are joined in the order in which the pages arrive, which no transport promises."""
    return join_in_order(items)


@drafted_fault(
    "packet-taken-twice",
    "family of sgl-project/sglang #29110: what has crossed once is pushed a second time on the decode worker",
    "a request that is handed over, takes a step, and is handed over again",
    on=ON,
)
def taken_twice(seams: Seams) -> Seams:
    """When a request comes again, the receiver takes the packet that it had from it before: older text and columns."""
    packets = dict[tuple[object, int], tuple[bytes, int]]()

    class TakenTwice(HandOver):
        def unpack(self, data: bytes, expected: ExpectedRequest) -> RequestState:
            key = (expected.case, expected.room)
            if expected.hop and key in packets:
                before, hop = packets[key]
                return super().unpack(before, replace(expected, hop=hop))
            packets[key] = (data, expected.hop)
            return super().unpack(data, expected)

    return replace(seams, hand_over=TakenTwice())
