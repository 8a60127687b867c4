"""Sights: the named faults of a draft that bets would have shown, and those that they would not."""

from collections.abc import Iterator
from dataclasses import dataclass

from specverify.properties.bet_group import BetGroup
from specverify.properties.laws.sampled.accept_bets import ACCEPT, FAULTS
from specverify.properties.laws.sampled.draft_faults import BETS


@dataclass(frozen=True)
class Sight:
    """One fault at one place of the texts.

    Attributes:
        fault: The fault in words.
        tokens: Number of tokens at the beginning of each text that the fault reaches; 0 for all.
        shown: Whether the bets would have shown it with probability .99.
        share: Share of the draws at these places that the weakest fault moves that would have shown; of the strongest
            that is bet on where none would have.
    """

    fault: str
    tokens: int
    shown: bool
    share: float


def sights(group: BetGroup, bar: float) -> tuple[Sight, ...]:
    """The faults of a group, each at each of its places, with whether a bet would have reached e^`bar`."""
    return tuple(_sights(group, bar))


def _sights(group: BetGroup, bar: float) -> Iterator[Sight]:
    bets = [(bet.fault, bet.tokens) for bet in BETS if bet.group == group.name]
    if group.name == ACCEPT:
        bets = [(fault, 0) for fault in FAULTS]
    for fault, tokens in dict.fromkeys(bets):
        numbers = [number for number, bet in enumerate(bets) if bet == (fault, tokens)]
        shares = [group.mean_shift(number) for number in numbers if group.sees(number, bar)]
        yield Sight(fault, tokens, bool(shares), min(shares) if shares else max(map(group.mean_shift, numbers)))
