"""Mailboxes, through which the items of a hand-over reach another process."""

import random
import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from specverify.backends.engine.handover.items import (
    Gathering,
    Item,
    item_of,
    items_of,
    join_in_order,
    letter_of,
    page_of,
)
from specverify.backends.engine.handover.packet import BadHandOver, ExpectedRequest, unpack
from specverify.backends.engine.handover.state import RequestState


class PeerLost(Exception):
    """The other side is gone, or sends nothing; the message says which, and what was awaited."""


class Mailbox(Protocol):
    """One side's end of a pair of mailboxes; letters arrive in the order in which they were posted."""

    def post(self, letter: bytes) -> None:
        """Send a letter.

        Raises:
            PeerLost: The other side is gone.
        """
        ...

    def take(self, seconds: float) -> bytes:
        """The next letter.

        Raises:
            PeerLost: The other side is gone, or no letter came within so many seconds.
        """
        ...


class HandOver:
    """The two ends of a hand-over by mailbox; a planted fault is a subclass with another method."""

    def unpack(self, data: bytes, expected: ExpectedRequest) -> RequestState:
        """The state in the packet `data` of the request that is expected; see `packet.unpack`."""
        return unpack(data, expected)

    def shuffle(self, items: Sequence[Item]) -> list[Item]:
        """The order in which a sender posts its items: any order, and the same one every time."""
        shuffled = list(items)
        random.Random(f"{shuffled[0].room} {shuffled[0].hop} {len(shuffled)}").shuffle(shuffled)
        return shuffled

    def is_complete(self, arrived_names: Collection[str], names: Collection[str]) -> bool:
        """Whether the receiver may begin: all items are there."""
        return set(arrived_names) == set(names)

    def join(self, items: Sequence[Item]) -> bytes:
        """The packet of the items, in whatever order they came: KV pages are joined by their numbers."""
        return join_in_order(sorted(items, key=lambda item: page_of(item.name)))

    def letters_of(self, packet: bytes, run: int) -> list[bytes]:
        """The letters of `packet` for the case of that number, in the order in which they are to be posted."""
        return [letter_of(item) for item in self.shuffle(items_of(packet, run))]

    def receive_packet(
        self,
        mailbox: Mailbox,
        key: tuple[int, int, int],
        letters: int,
        seconds: float,
        beat: Callable[[], None],
    ) -> bytes:
        """The packet of one hand-over, of which the sender has told so many letters; `beat` is called after each.

        `key` numbers the case, the request and its earlier hand-overs. The receiver waits for `seconds` in all.

        Raises:
            BadHandOver: An item does not fit, or the sender has told of fewer letters than items.
            PeerLost: Items are missing.
        """
        gathering = Gathering(*key)
        until = time.monotonic() + seconds
        letters_left = letters
        packet: bytes | None = None
        failure: BadHandOver | None = None
        # All letters are taken, whatever one of them holds: a sender may wait until they are.
        while letters_left:
            try:
                letter = mailbox.take(max(until - time.monotonic(), 0.0))
            except PeerLost as error:
                raise PeerLost(f"{gathering.missing()} ({error})") from None
            letters_left -= 1
            beat()
            try:
                if failure is None:
                    gathering.take(item_of(letter))
            except BadHandOver as error:
                failure = error
            if (
                failure is None
                and packet is None
                and gathering.items
                and self.is_complete(gathering.arrived_names, gathering.names)
            ):
                packet = self.join(gathering.items)
        if failure is not None or packet is None:
            raise failure or BadHandOver(gathering.missing())
        return packet
