"""Items of a hand-over: a packet in parts, as it travels between two processes.

The parts are KV pages, hidden states, first token, positions, coins, grammar, and what the request is. A transport
promises no order, and a sender none. Each item says which request and hand-over it is of, its name, the names of all
items, and a digest of its bytes. Whatever is missing, late, there twice or changed is told by its name.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from specverify.backends.engine.handover.packet import BadHandOver, read_packet

FORMAT = "specverify hand-over item 1"

PAGE = 4
"""Columns of a KV cache in one item."""

FACTS = {
    "first-token": ("tokens", "logprob"),
    "positions": ("position", "target", "draft"),
    "coins": ("lengths", "proposed", "draft_calls", "draft_steps"),
    "grammar": ("matched",),
}
"""Items that hold facts of a packet; the facts of no other item are those of the item `request`."""

HEAD = ("format", "run", "room", "hop", "name", "names", "facts", "digest")


@dataclass(frozen=True)
class Item:
    """One part of a packet.

    Attributes:
        run: The number of the case that both sides play.
        room: The number of the request in its session.
        hop: How many times the request was handed over before.
        name: The name of the item.
        names: The names of all items of the packet.
        facts: Facts of the packet.
        tensors: Tensors of the packet; of a KV page, its columns.
    """

    run: int
    room: int
    hop: int
    name: str
    names: tuple[str, ...]
    facts: dict[str, Any]
    tensors: dict[str, Tensor]

    def __str__(self) -> str:
        return f"item {self.name} of request {self.room}"


def items_of(packet: bytes, run: int) -> list[Item]:
    """The items of `packet`, in the order of their names."""
    facts, tensors = read_packet(packet)
    facts_in: dict[str, dict[str, Any]] = {"request": dict(facts)}
    for name, fact_names in FACTS.items():
        facts_in[name] = {fact: facts_in["request"].pop(fact) for fact in fact_names if fact in facts}
    tensors_in: dict[str, dict[str, Tensor]] = {name: {} for name in facts_in}
    for tensor, tensor_data in tensors.items():
        for item, part in _parts(tensor, tensor_data, facts):
            tensors_in.setdefault(item, {})[tensor] = part
    names = tuple(sorted(tensors_in))
    key = (run, facts["room"], facts["hop"])
    return [Item(*key, name, names, facts_in.get(name, {}), tensors_in[name]) for name in names]


def _parts(tensor: str, tensor_data: Tensor, facts: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The items in which a tensor travels, each with the part that it holds."""
    role, *levels = tensor.split(".")
    if not levels or levels[0] not in ("keys", "values"):
        yield (f"{role}.states" if levels else role), tensor_data
        return
    first = facts[role]["first"][int(levels[1])]
    end = first + tensor_data.shape[1]
    for page in range(first // PAGE, max(first, end - 1) // PAGE + 1):
        begin = max(page * PAGE, first)
        yield f"{role}.page.{page}", tensor_data[:, begin - first : min((page + 1) * PAGE, end) - first]


def page_of(name: str) -> int:
    """The number of the KV page in an item's name; -1 for other items."""
    return int(name.rsplit(".", 1)[1]) if ".page." in name else -1


def join_in_order(items: Sequence[Item]) -> bytes:
    """The packet of the items, whose pages are joined in the order given."""
    facts: dict[str, Any] = {}
    parts: dict[str, list[Tensor]] = {}
    for item in items:
        facts |= item.facts
        for name, tensor in item.tensors.items():
            parts.setdefault(name, []).append(tensor)
    tensors = {name: torch.cat(pages, 1) if len(pages) > 1 else pages[0].clone() for name, pages in parts.items()}
    return bytes(save(tensors, {"facts": json.dumps(facts)}))


def letter_of(item: Item) -> bytes:
    """The bytes of an item: one line of JSON, and a safetensors file."""
    body = bytes(save({name: tensor.contiguous().clone() for name, tensor in item.tensors.items()}))
    head = {name: getattr(item, name) for name in HEAD if name not in ("format", "digest")}
    head |= {"format": FORMAT, "digest": _digest(head, body)}
    return json.dumps(head).encode() + b"\n" + body


def item_of(letter: bytes) -> Item:
    """The item in `letter`.

    Raises:
        BadHandOver: The letter holds no item, or a changed one.
    """
    line, _, body = letter.partition(b"\n")
    try:
        head = json.loads(line)
    except ValueError:
        raise BadHandOver(f"a letter of {len(letter)} bytes holds no item of a hand-over") from None
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        format_name = head.get("format") if isinstance(head, dict) else None
        raise BadHandOver(f"an item's format is {format_name!r}; this side reads {FORMAT!r}")
    missing_fields = [name for name in HEAD if name not in head]
    if missing_fields:
        raise BadHandOver(f"item {head.get('name')!r} does not tell its {missing_fields[0]}")
    told_digest = head.pop("digest")
    if told_digest != _digest({name: head[name] for name in HEAD if name in head and name != "format"}, body):
        raise BadHandOver(f"item {head['name']} of request {head['room']} was changed or cut on its way")
    run, room, hop, name = (head[field] for field in HEAD[1:5])
    return Item(run, room, hop, name, tuple(head["names"]), head["facts"], load(body))


def _digest(head: dict[str, Any], body: bytes) -> str:
    head_text = json.dumps({name: head[name] for name in sorted(head)}).encode()
    return hashlib.sha256(head_text + body).hexdigest()[:16]


class Gathering:
    """The items of one hand-over, as the receiver has them.

    Attributes:
        items: The items, in the order in which they came.
    """

    def __init__(self, run: int, room: int, hop: int) -> None:
        self.items: list[Item] = []
        self._key = (run, room, hop)

    @property
    def arrived_names(self) -> tuple[str, ...]:
        """The names of the items."""
        return tuple(item.name for item in self.items)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all items, as the first one tells them; none before the first."""
        return self.items[0].names if self.items else ()

    def take(self, item: Item) -> None:
        """Take an item; one of an earlier case is passed over, whose run is known to have failed.

        Raises:
            BadHandOver: It is of another request or hand-over, unknown, or there twice.
        """
        run, room, hop = self._key
        if item.run < run:
            return
        if item.run != run or item.room != room:
            raise BadHandOver(f"{item} of case {item.run} came; request {room} of case {run} is expected")
        if item.hop != hop:
            lateness = "late" if item.hop < hop else "early"
            raise BadHandOver(f"{item} is {lateness}: it is of hand-over {item.hop}, and {hop} is expected")
        if self.items and item.names != self.names:
            raise BadHandOver(f"{item} tells of other items than the first one that came")
        if item.name not in item.names:
            raise BadHandOver(f"{item} is none of the items that the sender tells of")
        if item.name in self.arrived_names:
            raise BadHandOver(f"{item} came twice")
        self.items.append(item)

    def missing(self) -> str:
        """What is not there yet, in words."""
        _, room, hop = self._key
        if not self.items:
            return f"no item of request {room} came for its hand-over {hop}"
        missing_names = [name for name in self.names if name not in self.arrived_names]
        others = f" and {len(missing_names) - 1} more" if len(missing_names) > 1 else ""
        count = f"{len(self.items)} of {len(self.names)}"
        return f"item {missing_names[0]}{others} of request {room} is missing: {count} came"
