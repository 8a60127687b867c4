"""Bets on named faults of an engine whose draft is known: the laws that they would give its tokens.

A bet states the share of draws that its fault reaches: a bonus, for example, is drawn without any drafted token. Where
an engine shows drafted tokens, their law and its choice, bets are on the acceptance too.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from specverify.reference.trace import Array

TINY = 1e-12
"""Least that a bet pays: a fault may leave nothing of a token."""

LawUnderFault = Callable[[Array, Array], Array]
"""Function from the target's law p [V] and the draft's law q [V] to the law of a faulty engine's token [V]."""


def without_residual(p: Array, q: Array) -> Array:
    """The law of an engine that draws a rejected token's replacement from p itself."""
    accepted = np.minimum(p, q)
    return np.asarray(accepted + (1.0 - accepted.sum()) * p)


def drafted_law(p: Array, q: Array) -> Array:
    """The law of an engine that accepts every drafted token."""
    return np.where(p > 0, q, 0.0)


def away_from_draft(p: Array, q: Array) -> Array:
    """As far from p as q is, in the other direction, where that leaves a probability."""
    return np.maximum(2.0 * p - q, 0.0)


def coin_by_id(p: Array, q: Array) -> Array:
    """The law where the coin that drew the drafted token, by q's cumulative sums in the order of ids, also accepts it.

    Token x is drafted where the coin lies in q's interval of x, and accepted where the coin also lies below p(x)/q(x).
    """
    ends = np.cumsum(q)
    ratio = np.divide(p, q, out=np.full_like(p, np.inf), where=q > 0)
    accepted = np.maximum(np.minimum(ends, ratio) - (ends - q), 0.0)
    residual = np.maximum(p - q, 0.0)
    residual = residual / residual.sum() if residual.sum() > 0 else p
    return np.asarray(accepted + max(0.0, 1.0 - accepted.sum()) * residual)


def coin_by_rank(p: Array, q: Array) -> Array:
    """The same, with the cumulative sums from q's likeliest token down, as samplers sum that sort for top-p."""
    order = np.argsort(-q, kind="stable")
    law = np.empty_like(p)
    law[order] = coin_by_id(p[order], q[order])
    return law


COIN_ORDERS: dict[str, Callable[[Array], Array]] = {
    "by order of ids": lambda q: np.arange(len(q)),
    "by order of mass": lambda q: np.argsort(-q, kind="stable"),
}
"""The orders in which a sampler adds up q, each a function from q to the ids in that order."""


@dataclass(frozen=True)
class Bet:
    """One bet.

    Attributes:
        group: Name of the bets that share their money.
        fault: Name of the fault in words.
        law: The law of a token that the fault reaches.
        share: Share of draws that the fault is taken to reach.
        tokens: Number of tokens at the beginning of a text on which the bet is; 0 for all. Draft and verifier whose
            generators have one seed draw in step through the first block, and may part behind it.
    """

    group: str
    fault: str
    law: LawUnderFault
    share: float
    tokens: int = 0

    def covers(self, place: int) -> bool:
        """Whether the bet is on the token at `place` of a text."""
        return not self.tokens or place < self.tokens


RESIDUAL, DIRECTION, COIN = "on the draft", "along p - q of the draft", "on a coin of the draft"
"""The names of the groups; a stream bears the name of its group."""

BETS = (
    *(Bet(RESIDUAL, "a replacement drawn from p", without_residual, share) for share in (0.25, 0.5, 1.0)),
    *(
        Bet(DIRECTION, fault, law, share, tokens)
        for tokens in (0, 1, 4)
        for fault, law in (("a lean towards the draft", drafted_law), ("a lean away from the draft", away_from_draft))
        for share in (0.1, 0.3, 0.9)
    ),
    *(
        Bet(COIN, f"a coin that drafts and accepts, {order}", law, share, tokens)
        for tokens in (0, 1, 2, 4)
        for order, law in zip(COIN_ORDERS, (coin_by_id, coin_by_rank), strict=True)
        for share in (0.4, 0.9)
    ),
)
"""All bets, group by group."""

GROUPS = {name: sum(bet.group == name for bet in BETS) for name in (RESIDUAL, DIRECTION, COIN)}
"""Number of bets of each group."""


def payments(p: Array, q: Array, place: int) -> dict[str, Array]:
    """The payments of each group's bets for each token, above 0, float64 [bets, V].

    A bet pays the likelihood ratio of its law, the mixture of the faulty law and p by the bet's share, to p. Under p
    each bet has mean 1, and a bet on another place pays 1 whatever comes. Nothing else is needed of the faulty laws:
    whatever they are, `specverify.properties.bet_group.GroupSums` divides by the most that a bet pays on average. `p`
    [V] and `q` [V] are the laws of target and draft, and `place` is that of the token in its text.
    """
    laws = {law: law(p, q) for law in dict.fromkeys(bet.law for bet in BETS)}
    rows: dict[str, list[Array]] = {name: [] for name in GROUPS}
    for bet in BETS:
        ratio = np.divide(laws[bet.law], p, out=np.ones_like(p), where=p > 0)
        pays = 1.0 + bet.share * (ratio - 1.0)
        rows[bet.group].append(np.maximum(pays, TINY) if bet.covers(place) else np.ones_like(p))
    return {name: np.stack(group) for name, group in rows.items()}


ACCEPT = "on acceptance of the draft"
"""The name of the group."""

THETAS = (-1.6, -0.4, -0.1, 0.1, 0.4, 1.6)
"""Tilts of the odds that any drafted token is accepted."""

SHARES = (0.4, 0.9)
"""Shares of the drafted tokens whose coin is taken to be that of their acceptance too."""


@dataclass(frozen=True)
class Event:
    """The facts of an acceptance that are known before it comes.

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
