"""Mailboxes, through which the items of a hand-over reach another process."""

import time
from collections.abc import Callable
from typing import Protocol

from backends.engine.handover.items import Gathering, item_of, items_of, letter_of
from backends.engine.handover.packet import BadHandOver
from backends.engine.handover.seams import HandOverSeams


class Lost(Exception):
    """The other side is gone, or sends nothing; the message says which, and what was awaited."""


class Mailbox(Protocol):
    """One side's end of a pair of mailboxes; letters arrive in the order in which they were posted."""

    def post(self, letter: bytes) -> None:
        """Send a letter.

        Raises:
            Lost: The other side is gone.
        """
        ...

    def take(self, seconds: float) -> bytes:
        """The next letter.

        Raises:
            Lost: The other side is gone, or no letter came within so many seconds.
        """
        ...


def sent_as(packet: bytes, run: int, over: HandOverSeams) -> list[bytes]:
    """The letters of `packet` for the case of that number, in the order in which they are to be posted."""
    return [letter_of(one) for one in over.mixed(items_of(packet, run))]


def received(
    mailbox: Mailbox,
    of: tuple[int, int, int],
    letters: int,
    seconds: float,
    over: HandOverSeams,
    beat: Callable[[], None],
) -> bytes:
    """The packet of one hand-over.

    Args:
        mailbox: Where its items arrive.
        of: The number of the case, of the request and of its earlier hand-overs.
        letters: The number of letters that the sender has told.
        seconds: How long the receiver waits in all.
        over: The functions of the hand-over.
        beat: Called after each letter, as a sign that this side is at work.

    Raises:
        BadHandOver: An item does not fit, or the sender has told of fewer letters than items.
        Lost: Items are missing.
    """
    found, until, left = Gathering(*of), time.monotonic() + seconds, letters
    packet: bytes | None = None
    wrong: BadHandOver | None = None
    # All letters are taken, whatever one of them holds: a sender may wait until they are.
    while left:
        try:
            letter = mailbox.take(max(until - time.monotonic(), 0.0))
        except Lost as why:
            raise Lost(f"{found.missing()} ({why})") from None
        left -= 1
        beat()
        try:
            if wrong is None:
                found.take(item_of(letter))
        except BadHandOver as why:
            wrong = why
        if wrong is None and packet is None and found.items and over.arrived(found.came, found.names):
            packet = over.joined(found.items)
    if wrong is not None or packet is None:
        raise wrong or BadHandOver(found.missing())
    return packet
