"""Coins: the uniforms of a batch of requests, each with its place, and the cell of the tape that a decision fixes."""

from collections.abc import Callable

import torch
from torch import Tensor

from reference.tape import KINDS

Below = Callable[[Tensor, Tensor], Tensor]
Inverse = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def below(coin: Tensor, threshold: Tensor) -> Tensor:
    """Whether each coin falls below its threshold; half-open, so a threshold of 0 is never met (SGLang #35798)."""
    return coin < threshold


def inverse(coin: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The token that each coin draws from `weights` [B, V] by inverse CDF in order of ids.

    Edges are the running sum over its total, made monotonic, since a parallel scan need not be (FlashInfer), and an id
    of weight 0 has an empty interval whatever the rounding.

    Returns:
        token int64 [B], and the ends of the interval of coins that draw it: low (inclusive) and high (exclusive).
    """
    total = weights.sum(-1, keepdim=True)
    edges = torch.where(weights > 0, weights.cumsum(-1) / total, 0.0).cummax(-1).values
    # The last id with any weight ends at 1, so that no coin falls through.
    edges = torch.where(edges >= edges[:, -1:], torch.ones_like(edges), edges)
    token = (edges <= coin[:, None]).sum(-1)
    high = edges.gather(1, token[:, None])[:, 0]
    low = torch.where(token > 0, edges.gather(1, (token - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    return token, low, high


class Coins:
    """One step's uniforms for B requests; every decision that chance makes asks here.

    With `record`, `low` and `high` keep for each coin the interval around it in which every decision asked of it comes
    out the same: float64 [B, coins], from 0 and 1 on; `spent` lists the places asked, decision by decision. `asked`
    says for which requests a decision counts; others get an answer that must not matter.
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
        """Where the coin of `kind` for `node` [B] lies in the step; as `reference.tape.place`."""
        return torch.full_like(node, 3 * self.nodes) if kind == "bonus" else KINDS.index(kind) * self.nodes + node

    def below(self, place: Tensor, threshold: Tensor, asked: Tensor) -> Tensor:
        """Whether the coin at `place` [B] lies below `threshold` [B]."""
        coin = self.uniforms.gather(1, place[:, None])[:, 0]
        hit = self._below(coin, threshold)
        if self._record:
            edge = threshold.double().clamp(0.0, 1.0)
            self._narrow(place, torch.where(hit, 0.0, edge), torch.where(hit, edge, 1.0), asked)
        return hit

    def first_below(self, place: Tensor, thresholds: Tensor, asked: Tensor) -> Tensor:
        """The first of ascending `thresholds` [B, K] that the coin at `place` [B] lies below; K where there is none."""
        coin = self.uniforms.gather(1, place[:, None])[:, 0]
        hit = self._below(coin[:, None], thresholds)
        ranks = torch.arange(thresholds.shape[1], device=place.device)
        first = torch.where(hit, ranks, thresholds.shape[1]).min(-1).values
        if self._record:
            edges = torch.nn.functional.pad(thresholds.double().clamp(0.0, 1.0), (1, 1), value=0.0)
            edges[:, -1] = 1.0
            low, high = edges.gather(1, first[:, None])[:, 0], edges.gather(1, first[:, None] + 1)[:, 0]
            self._narrow(place, low, high, asked)
        return first

    def choose(self, place: Tensor, weights: Tensor, asked: Tensor) -> Tensor:
        """The index that the coin at `place` [B] draws from `weights` [B, V], which need not sum to 1."""
        coin = self.uniforms.gather(1, place[:, None])[:, 0]
        token, low, high = self._inverse(coin, weights)
        if self._record:
            self._narrow(place, low.double(), high.double(), asked)
        return token

    def _narrow(self, place: Tensor, low: Tensor, high: Tensor, asked: Tensor) -> None:
        assert self.low is not None
        assert self.high is not None
        self.spent.append((place, asked))
        at = place[:, None]
        old_low, old_high = self.low.gather(1, at)[:, 0], self.high.gather(1, at)[:, 0]
        new_low = torch.where(asked, torch.maximum(old_low, low), old_low)
        new_high = torch.where(asked, torch.minimum(old_high, high), old_high)
        self.low = self.low.scatter(1, at, new_low[:, None])
        self.high = self.high.scatter(1, at, new_high[:, None])


def rounded(uniforms: Tensor, dtype: torch.dtype) -> Tensor:
    """Coins in a working dtype, rounded down: plain rounding would make 1.0 of the largest."""
    if dtype == torch.float64:
        return uniforms.to(dtype)
    return (torch.floor(uniforms * 2.0**24) * 2.0**-24).to(dtype)


def spent_by(dice: Coins, request: int) -> tuple[int, ...]:
    """The places whose coins decided for one request, in order, each as often as it was asked."""
    return tuple(int(place[request]) for place, asked in dice.spent if bool(asked[request]))
