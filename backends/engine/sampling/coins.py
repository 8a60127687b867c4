"""The coins of a batch of requests: uniforms with a fixed place on the tape.

`Coins` can also record, for each coin, the interval in which every decision made with it would come out the same. The
law of a rule is enumerated from these intervals.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from specverify.reference.tape import KINDS

Below = Callable[[Tensor, Tensor], Tensor]
"""The signature of `below`."""

Inverse = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""The signature of `inverse`."""


def below(coin: Tensor, threshold: Tensor) -> Tensor:
    """Whether each coin is below its threshold; strictly, so that a threshold of 0 accepts no coin (SGLang #35798)."""
    return coin < threshold


def inverse(coin: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The token that each coin draws from `weights` [B, V] by inverse CDF in order of ids.

    The edges of the intervals are the running sum divided by the total. They are made monotonic, since the result of a
    parallel scan need not be (FlashInfer). An id of weight 0 has an empty interval whatever the rounding.

    Returns:
        token int64 [B], and the ends of the interval of coins that draw it: low (inclusive) and high (exclusive).
    """
    total = weights.sum(-1, keepdim=True)
    # Edge 0 at ids of weight 0 becomes the edge before them in the running maximum: an empty interval.
    edges = torch.where(weights > 0, weights.cumsum(-1) / total, 0.0).cummax(-1).values
    # The interval of the last id with any weight ends at 1, so that every coin draws a token.
    edges = torch.where(edges >= edges[:, -1:], torch.ones_like(edges), edges)
    token = (edges <= coin[:, None]).sum(-1)
    high = edges.gather(1, token[:, None])[:, 0]
    low = torch.where(token > 0, edges.gather(1, (token - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    return token, low, high


class Coins:
    """The uniforms of one step for B requests; every random decision reads its coin here.

    With `record`, `low` and `high`, float64 [B, coins], hold for each coin the interval around it in which every
    decision made with it comes out the same; they begin at 0 and 1. `spent` lists the places that were read, decision
    by decision. In every method `active` [B] marks the requests for which the decision counts; the answer for any other
    request must not be used.
    """

    def __init__(
        self, uniforms: Tensor, nodes: int, record: bool = False, below: Below = below, inverse: Inverse = inverse
    ) -> None:
        self.uniforms = uniforms
        self.nodes = nodes
        self._below = below
        self._inverse = inverse
        self._record = record
        self.low = torch.zeros_like(uniforms, dtype=torch.float64) if record else None
        self.high = torch.ones_like(uniforms, dtype=torch.float64) if record else None
        self.spent: list[tuple[Tensor, Tensor]] = []

    def place(self, kind: str, node: Tensor) -> Tensor:
        """The place, in the step, of the coin of `kind` for `node` [B]; see `specverify.reference.tape.place`."""
        return torch.full_like(node, 3 * self.nodes) if kind == "bonus" else KINDS.index(kind) * self.nodes + node

    def below(self, place: Tensor, threshold: Tensor, active: Tensor) -> Tensor:
        """Whether the coin at `place` [B] is below `threshold` [B]."""
        coin = self.uniforms.gather(1, place[:, None])[:, 0]
        hit = self._below(coin, threshold)
        if self._record:
            # A hit holds for all coins from 0 to the threshold, a miss for all from the threshold to 1.
            edge = threshold.double().clamp(0.0, 1.0)
            self._narrow(place, torch.where(hit, 0.0, edge), torch.where(hit, edge, 1.0), active)
        return hit

    def first_below(self, place: Tensor, thresholds: Tensor, active: Tensor) -> Tensor:
        """The index of the first of ascending `thresholds` [B, K] above the coin at `place` [B]; K if none is."""
        coin = self.uniforms.gather(1, place[:, None])[:, 0]
        hit = self._below(coin[:, None], thresholds)
        ranks = torch.arange(thresholds.shape[1], device=place.device)
        first = torch.where(hit, ranks, thresholds.shape[1]).min(-1).values
        if self._record:
            edges = torch.nn.functional.pad(thresholds.double().clamp(0.0, 1.0), (1, 1), value=0.0)
            edges[:, -1] = 1.0
            low, high = edges.gather(1, first[:, None])[:, 0], edges.gather(1, first[:, None] + 1)[:, 0]
            self._narrow(place, low, high, active)
        return first

    def part(self, uniforms: Tensor, share: Callable[[Tensor], Tensor]) -> "Coins":
        """The coins `uniforms` of some of the requests; `share` takes the rows of these requests out of a tensor."""
        coins = Coins(uniforms, self.nodes, self._record, self._below, self._inverse)
        if self.low is not None and self.high is not None:
            coins.low, coins.high = share(self.low), share(self.high)
        return coins

    def choose(self, place: Tensor, weights: Tensor, active: Tensor) -> Tensor:
        """The index that the coin at `place` [B] draws from `weights` [B, V]; the weights need not sum to 1."""
        coin = self.uniforms.gather(1, place[:, None])[:, 0]
        token, low, high = self._inverse(coin, weights)
        if self._record:
            self._narrow(place, low.double(), high.double(), active)
        return token

    def _narrow(self, place: Tensor, low: Tensor, high: Tensor, active: Tensor) -> None:
        assert self.low is not None
        assert self.high is not None
        self.spent.append((place, active))
        # One coin may decide more than once: the intervals of its decisions are intersected.
        column = place[:, None]
        old_low, old_high = self.low.gather(1, column)[:, 0], self.high.gather(1, column)[:, 0]
        new_low = torch.where(active, torch.maximum(old_low, low), old_low)
        new_high = torch.where(active, torch.minimum(old_high, high), old_high)
        self.low = self.low.scatter(1, column, new_low[:, None])
        self.high = self.high.scatter(1, column, new_high[:, None])


def round_coins(uniforms: Tensor, dtype: torch.dtype) -> Tensor:
    """Coins in a working dtype, rounded down, because rounding to nearest would turn the largest coin into 1.0."""
    if dtype == torch.float64:
        return uniforms.to(dtype)
    # Multiples of 2^-24 are exact in float32, as seeded coins are (`specverify.reference.tape.RESOLUTION`).
    return (torch.floor(uniforms * 2.0**24) * 2.0**-24).to(dtype)


def spent_places(dice: Coins, request: int) -> tuple[int, ...]:
    """The places of the coins that decided for one request, in order, each as often as it was read."""
    if not dice.spent:
        return ()
    # One transfer for all of them: each would wait for the device.
    places = torch.stack([torch.where(active[request], place[request], -1) for place, active in dice.spent]).tolist()
    return tuple(place for place in places if place >= 0)
