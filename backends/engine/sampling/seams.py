"""The seams of sampling: each decision of drafting and acceptance as a function that can be exchanged by name."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from backends.engine.sampling import coins, processing
from backends.engine.sampling.coins import Below, Coins, Inverse
from backends.engine.sampling.forest import Forest
from backends.engine.sampling.processing import History
from reference.sampling import Sampling, Stops

Law = Callable[[Tensor, Sampling, Stops, "History | None"], Tensor]


def residual(law: Tensor, proposal: Tensor, token: Tensor, row: Tensor) -> Tensor:
    """relu(law - proposal), normalised, [B, V]: what is left of `law` once `token`, drawn from `proposal`, is rejected.

    Where nothing is left, which happens with probability zero but for rounding, the node's own row stands in.
    """
    left = (law - proposal).clamp(min=0)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total, row)


def without(law: Tensor, tokens: Tensor) -> Tensor:
    """`law` [B, V] with the tokens of a mask bool [B, V] removed, normalised; unchanged where nothing would be left."""
    left = law.masked_fill(tokens, 0.0)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total, law)


def sibling_law(proposal: Tensor, tried: Tensor, removed: bool) -> Tensor:
    """The law of the next sibling [B, V]: without the tokens `tried`, if siblings are drawn without replacement."""
    return without(proposal, tried) if removed else proposal


def handed_over(drawn_from: Tensor, logits: Tensor, sampling: Sampling) -> Tensor:
    """The proposal that the verifier is given for tokens drawn from `drawn_from`: that law itself [B, N, V]."""
    return drawn_from


def of_node(proposal: Tensor, node: Tensor) -> Tensor:
    """The proposals [B, V], of those of all nodes [B, N, V], from which the tokens of the nodes `node` [B] came."""
    return proposal[torch.arange(len(node), device=node.device), node]


def block_residual(row: Tensor, offered: Tensor, pi: Tensor) -> Tensor:
    """relu(pi * row - offered), [B, V], not normalised: what a block's weight leaves of a row (Sun et al. 2024).

    Args:
        row: [B, V]; the target's law after a node.
        offered: [B, V]; the law from which the token below that node was drawn.
        pi: [B]; the weight of the block up to that node.
    """
    return (pi[:, None] * row - offered).clamp(min=0)


def block_ratio(row: Tensor, offered: Tensor, pi: Tensor) -> Tensor:
    """The probability [B] that a block may end at a node with a child: m / (m + 1 - pi), m what its residual holds."""
    mass = block_residual(row, offered, pi).sum(-1)
    return torch.where(mass + 1 - pi > 0, mass / (mass + 1 - pi), torch.ones_like(mass))


def certain(token: Tensor, drawn_from: Tensor) -> Tensor:
    """The proposal of a deterministic draft: one-hot at its token [B, V], whatever scores ranked it."""
    return torch.nn.functional.one_hot(token, drawn_from.shape[-1]).to(drawn_from.dtype)


def accepts(dice: Coins, trees: Forest, child: Tensor, threshold: Tensor, asked: Tensor) -> Tensor:
    """Whether the coin of `child` [B] lies below `threshold`: one test for each node, however many leaves share it."""
    return dice.below(dice.place("accept", child), threshold, asked)


def last_law(target: Tensor, at: Tensor, left: Tensor, stopped: Tensor, rejected: Tensor) -> Tensor:
    """The law of the token after the path [B, V]: the residual where children were rejected, else the node's own row.

    Args:
        target: [B, N, V].
        at: int64 [B]; the last accepted node.
        left: [B, V]; what the last tried level left of its law.
        stopped: bool [B]; whether `at` has children, all of them rejected.
        rejected: int64 [B]; the last rejected child of the last tried level, 0 for none.
    """
    row = target[torch.arange(len(at), device=at.device), at]
    return torch.where(stopped[:, None], left, row)


def bonus_place(dice: Coins, at: Tensor, rejected: Tensor) -> Tensor:
    """Where the coin of the last token lies; `rejected` [B] is the last rejected node, 0 for none."""
    return dice.place("bonus", at)


def own_coins(uniforms: Tensor) -> Tensor:
    """The coins of each request [B, coins]: its own."""
    return uniforms


@dataclass(frozen=True)
class SamplingSeams:
    """The engine's sampling as it is meant to be, function by function.

    Attributes:
        scores: Target logits to what greedy decoding compares.
        target_law: Target logits to laws.
        bonus_law: Target logits to the law of the last token, where no residual takes its place.
        draft_law: Draft logits to the laws that tokens are drawn from.
        handed_over: Those laws to the proposals that the verifier sees.
        certain: The proposal for a token that was not drawn.
        history: Trees, prompt and output to what lies before each node, for whatever looks back.
        of_node: Proposals to those of one node for each request.
        block_ratio: How likely a block ends at a node.
        block_residual: What a block that ends there leaves of the law.
        sibling_law: A proposal to the law of the next sibling.
        residual: A law after a rejection.
        accepts: One acceptance test.
        last_law: The law of the last token.
        bonus_place: The coin of the last token.
        own_coins: The coins of each request.
        below: A coin against a threshold.
        inverse: A coin to a token.
    """

    scores: Callable[[Tensor, Sampling, Stops, History], Tensor] = processing.scores
    target_law: Law = processing.law
    bonus_law: Law = processing.law
    draft_law: Law = processing.law
    handed_over: Callable[[Tensor, Tensor, Sampling], Tensor] = handed_over
    certain: Callable[[Tensor, Tensor], Tensor] = certain
    history: Callable[[Forest, tuple[int, ...], tuple[int, ...], Sampling, int], History] = processing.history
    of_node: Callable[[Tensor, Tensor], Tensor] = of_node
    block_ratio: Callable[[Tensor, Tensor, Tensor], Tensor] = block_ratio
    block_residual: Callable[[Tensor, Tensor, Tensor], Tensor] = block_residual
    sibling_law: Callable[[Tensor, Tensor, bool], Tensor] = sibling_law
    residual: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = residual
    accepts: Callable[[Coins, Forest, Tensor, Tensor, Tensor], Tensor] = accepts
    last_law: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] = last_law
    bonus_place: Callable[[Coins, Tensor, Tensor], Tensor] = bonus_place
    own_coins: Callable[[Tensor], Tensor] = own_coins
    below: Below = coins.below
    inverse: Inverse = coins.inverse
