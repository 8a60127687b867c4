"""Bets on the acceptance of drafted tokens, where an engine shows them, their law and its choice."""

from dataclasses import dataclass

import numpy as np

from specverify.properties.laws.sampled.draft_faults import COIN_ORDERS, TINY
from specverify.reference.trace import Array

ACCEPT = "on acceptance of the draft"
"""The name of the group."""

THETAS = (-1.6, -0.4, -0.1, 0.1, 0.4, 1.6)
"""Tilts of the odds that any drafted token is accepted."""

SHARES = (0.4, 0.9)
"""Shares of the drafted tokens whose coin is taken to be that of their acceptance too."""


@dataclass(frozen=True)
class Event:
    """What is known of an acceptance before it comes.

    Attributes:
        pays: Payments of each bet for acceptance and for rejection, above 0, float64 [bets, 2].
        p: Probabilities of acceptance and rejection by the oracle's logits [2].
        high: The largest ones that a right engine may have [2].
    """

    pays: Array
    p: Array
    high: Array


FAULTS = (
    *(f"acceptance too {'seldom' if theta < 0 else 'often'}" for theta in THETAS),
    *(f"a coin that drafts and accepts, {words}" for words in COIN_ORDERS for _ in SHARES),
)
"""The fault that each bet of the group is about."""


def overall(p: Array, q: Array, low: Array, high: Array) -> Event:
    """Tilts of the acceptance of a token that is still to be drawn from q.

    A token drawn from q is accepted with probability sum q(x) min(1, p(x) / q(x)) = sum min(p, q), given all that came
    before its draw.
    """
    chance, least, most = (min(1.0, float(np.minimum(law, q).sum())) for law in (p, low, high))
    pays = np.array([[np.exp(theta), 1.0] for theta in THETAS])
    return Event(pays, np.array([chance, 1.0 - chance]), np.array([most, 1.0 - least]))


def by_token(p: Array, q: Array, low: Array, high: Array, token: int) -> Event:
    """Bets that the coin which drew `token` accepts it, given the token.

    The token is accepted with probability min(1, p / q) by a coin of its own. By the coin that drew it, it is accepted
    where the coin lies both in the token's interval of cumulative sums and below p / q.
    """
    chance, least, most = (min(1.0, float(law[token] / q[token])) for law in (p, low, high))
    pays = []
    for order in COIN_ORDERS.values():
        places = order(q)
        start = float(q[places[: int(np.flatnonzero(places == token)[0])]].sum())
        shared = min(1.0, max(0.0, (chance - start) / float(q[token])))
        odds = [shared / chance if chance > 0 else 1.0, (1.0 - shared) / (1.0 - chance) if chance < 1 else 1.0]
        pays += [[max(1.0 + share * (ratio - 1.0), TINY) for ratio in odds] for share in SHARES]
    return Event(np.array(pays), np.array([chance, 1.0 - chance]), np.array([most, 1.0 - least]))
