"""Faults of the coins of sampled acceptance.

A coin is used twice, ignored, compared wrongly at its threshold, or taken from another request.
"""

from dataclasses import replace

import torch
from torch import Tensor

from specverify.backends.engine.sampling.coins import Coins
from specverify.backends.engine.sampling.forest import Forest
from specverify.backends.engine.sampling.seams import SamplingSeams
from specverify.backends.faults.sampling.rejection import acceptance_fault


def coin_reused(seams: SamplingSeams) -> SamplingSeams:
    """The coin that rejected a token also draws the token that replaces it."""

    def bonus_place(dice: Coins, node: Tensor, rejected_node: Tensor) -> Tensor:
        # `rejected` is 0 where no node was rejected; such a request draws its last token by its own coin.
        return torch.where(
            rejected_node > 0, dice.place("accept", rejected_node), seams.bonus_place(dice, node, rejected_node)
        )

    return replace(seams, bonus_place=bonus_place)


def at_most(seams: SamplingSeams) -> SamplingSeams:
    """A coin equal to its threshold accepts."""
    return replace(seams, below=lambda coin, threshold: coin <= threshold)


def coin_zero(seams: SamplingSeams) -> SamplingSeams:
    """Acceptance compares 0 instead of the coin, so every token of positive ratio is accepted."""

    def accepts(dice: Coins, trees: Forest, child: Tensor, threshold: Tensor, open_requests: Tensor) -> Tensor:
        return seams.accepts(dice, trees, child, (threshold > 0).to(threshold.dtype), open_requests)

    return replace(seams, accepts=accepts)


def no_coin(seams: SamplingSeams) -> SamplingSeams:
    """A token is accepted exactly where p >= q, whatever its coin."""

    def accepts(dice: Coins, trees: Forest, child: Tensor, threshold: Tensor, open_requests: Tensor) -> Tensor:
        return seams.accepts(dice, trees, child, (threshold >= 1).to(threshold.dtype), open_requests)

    return replace(seams, accepts=accepts)


def neighbours_seed(seams: SamplingSeams) -> SamplingSeams:
    """Each request draws with its neighbour's coins."""
    # A batch of one has itself as its neighbour, and stays right.
    return replace(seams, own_coins=lambda uniforms: uniforms.roll(1, 0))


def coins_shared(seams: SamplingSeams) -> SamplingSeams:
    """Every second request uses the coins of the request before it, because its own were written to a copy."""

    def own_coins(uniforms: Tensor) -> Tensor:
        rows = torch.arange(len(uniforms), device=uniforms.device)
        return uniforms[rows - rows % 2]

    return replace(seams, own_coins=own_coins)


FAULTS = (
    acceptance_fault(
        "coin-reused-for-residual",
        "The coin that rejected a token also draws its replacement.",
        "catalogue BZ-087: same uniform number used for rejection and for resampling",
        "a rejection",
        coin_reused,
    ),
    acceptance_fault(
        "coin-at-threshold-accepts",
        "A coin equal to its threshold accepts, so a coin of 0 accepts a token of probability 0.",
        "catalogue BZ-060: zero-probability draft accepted when the coin is exactly 0",
        "a drafted token of probability 0 and a coin of 0",
        at_most,
    ),
    acceptance_fault(
        "acceptance-ignores-coin",
        "Acceptance compares 0 instead of its coin, so everything possible is accepted.",
        "catalogue BZ-039: probabilistic rejection kernel always accepts (u=0)",
        "a drafted token less probable than its proposal",
        coin_zero,
    ),
    acceptance_fault(
        "accepted-only-if-likelier",
        "A token is accepted exactly where p >= q, by no coin.",
        "speculative sampling accepts with probability min(1, p/q) (arXiv 2302.01318)",
        "a drafted token less probable than its proposal",
        no_coin,
    ),
    acceptance_fault(
        "neighbours-seed",
        "Each request of a batch draws with its neighbour's coins.",
        "per-request seeds, as serving engines offer them, read one row off",
        "two requests in a batch",
        neighbours_seed,
    ),
    acceptance_fault(
        "every-second-request-shares-coins",
        "Every second request of a batch draws with the coins of the one before.",
        "catalogue BZ-155: unseeded rows not filled when a batch mixes requests",
        "two requests in a batch",
        coins_shared,
    ),
)
