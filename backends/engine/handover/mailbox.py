"""Mailboxes, through which the items of a hand-over reach another process."""

import time
from collections.abc import Callable
from typing import Protocol

from specverify.backends.engine.handover.items import Gathering, item_of, items_of, letter_of
from specverify.backends.engine.handover.packet import BadHandOver
from specverify.backends.engine.handover.seams import HandOverSeams


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


def letters_of(packet: bytes, run: int, hand_over: HandOverSeams) -> list[bytes]:
    """The letters of `packet` for the case of that number, in the order in which they are to be posted."""
    return [letter_of(item) for item in hand_over.shuffle(items_of(packet, run))]


def receive_packet(
    mailbox: Mailbox,
    key: tuple[int, int, int],
    letters: int,
    seconds: float,
    hand_over: HandOverSeams,
    beat: Callable[[], None],
) -> bytes:
    """The packet of one hand-over.

    Args:
        mailbox: Where its items arrive.
        key: The number of the case, of the request and of its earlier hand-overs.
        letters: The number of letters that the sender has told.
        seconds: How long the receiver waits in all.
        hand_over: The functions of the hand-over.
        beat: Called after each letter, as a sign that this side is at work.

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
            and hand_over.is_complete(gathering.arrived_names, gathering.names)
        ):
            packet = hand_over.join(gathering.items)
    if failure is not None or packet is None:
        raise failure or BadHandOver(gathering.missing())
    return packet
