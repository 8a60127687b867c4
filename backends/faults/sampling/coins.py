"""Faults of the coins of sampled acceptance.

A coin is used twice, ignored, compared wrongly at its threshold, or taken from another request.
"""

import torch
from torch import Tensor

from specverify.backends.engine.sampling.coins import Coins
from specverify.backends.engine.sampling.forest import Forest
from specverify.backends.engine.sampling.seams import SamplingSeams
from specverify.backends.faults.fault import accepted_fault, in_place_of


@accepted_fault(
    "coin-reused-for-residual",
    "catalogue BZ-087: same uniform number used for rejection and for resampling",
    "a rejection",
)
@in_place_of("sampling.bonus_place")
def coin_reused(seams: SamplingSeams, dice: Coins, node: Tensor, rejected_node: Tensor) -> Tensor:
    """The coin that rejected a token also draws its replacement."""
    # `rejected` is 0 where no node was rejected; such a request draws its last token by its own coin.
    return torch.where(
        rejected_node > 0, dice.place("accept", rejected_node), seams.bonus_place(dice, node, rejected_node)
    )


@accepted_fault(
    "coin-at-threshold-accepts",
    "catalogue BZ-060: zero-probability draft accepted when the coin is exactly 0",
    "a drafted token of probability 0 and a coin of 0",
)
@in_place_of("sampling.below")
def at_most(seams: SamplingSeams, coin: Tensor, threshold: Tensor) -> Tensor:
    """A coin equal to its threshold accepts, so a coin of 0 accepts a token of probability 0."""
    return coin <= threshold


@accepted_fault(
    "acceptance-ignores-coin",
    "catalogue BZ-039: probabilistic rejection kernel always accepts (u=0)",
    "a drafted token less probable than its proposal",
)
@in_place_of("sampling.accepts")
def coin_zero(
    seams: SamplingSeams, dice: Coins, trees: Forest, child: Tensor, threshold: Tensor, open_requests: Tensor
) -> Tensor:
    """Acceptance compares 0 instead of its coin, so everything possible is accepted."""
    return seams.accepts(dice, trees, child, (threshold > 0).to(threshold.dtype), open_requests)


@accepted_fault(
    "accepted-only-if-likelier",
    "speculative sampling accepts with probability min(1, p/q) (arXiv 2302.01318)",
    "a drafted token less probable than its proposal",
)
@in_place_of("sampling.accepts")
def no_coin(
    seams: SamplingSeams, dice: Coins, trees: Forest, child: Tensor, threshold: Tensor, open_requests: Tensor
) -> Tensor:
    """A token is accepted exactly where p >= q, by no coin."""
    return seams.accepts(dice, trees, child, (threshold >= 1).to(threshold.dtype), open_requests)


@accepted_fault(
    "neighbours-seed", "per-request seeds, as serving engines offer them, read one row off", "two requests in a batch"
)
@in_place_of("sampling.own_coins")
def neighbours_seed(seams: SamplingSeams, uniforms: Tensor) -> Tensor:
    """Each request of a batch draws with its neighbour's coins."""
    # A batch of one has itself as its neighbour, and stays right.
    return uniforms.roll(1, 0)


@accepted_fault(
    "every-second-request-shares-coins",
    "catalogue BZ-155: unseeded rows not filled when a batch mixes requests",
    "two requests in a batch",
)
@in_place_of("sampling.own_coins")
def coins_shared(seams: SamplingSeams, uniforms: Tensor) -> Tensor:
    """Every second request of a batch draws with the coins of the one before.

    Its own were written to a copy.
    """
    rows = torch.arange(len(uniforms), device=uniforms.device)
    return uniforms[rows - rows % 2]
