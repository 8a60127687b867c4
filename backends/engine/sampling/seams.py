"""The seams of sampling: the replaceable functions of drafting and acceptance.

Each decision is one function, which a planted fault replaces by its name.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specverify.backends.engine.collectives import RANK_SEAMS, RankSeams
from specverify.backends.engine.guided import guide
from specverify.backends.engine.guided.guide import Guide, Masks
from specverify.backends.engine.sampling import coins, processing
from specverify.backends.engine.sampling.coins import Coins, Inverse
from specverify.backends.engine.sampling.forest import Forest
from specverify.backends.engine.sampling.processing import History
from specverify.backends.engine.sampling.question import Question
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.tree import Shape

Law = Callable[[Tensor, Sampling, Stops, "History | None"], Tensor]
"""From logits [B, N, V], settings, stops and history to the law [B, N, V]."""


def residual(law: Tensor, proposal: Tensor, token: Tensor, row: Tensor) -> Tensor:
    """relu(law - proposal), normalised, [B, V]: the residual of `law` after the rejection of a token from `proposal`.

    If nothing is left, the node's own law `row` replaces the residual. Without rounding this has probability zero.
    """
    difference = (law - proposal).clamp(min=0)
    total = difference.sum(-1, keepdim=True)
    return torch.where(total > 0, difference / total, row)


def without(law: Tensor, tokens: Tensor) -> Tensor:
    """`law` [B, V] without the tokens of the mask `tokens`, normalised; unchanged if nothing would be left."""
    remaining = law.masked_fill(tokens, 0.0)
    total = remaining.sum(-1, keepdim=True)
    return torch.where(total > 0, remaining / total, law)


def hand_over(drawn_from: Tensor, logits: Tensor, sampling: Sampling) -> Tensor:
    """The proposal that the verifier receives for tokens drawn from `drawn_from`: that law itself [B, N, V]."""
    return drawn_from


def accepts(dice: Coins, trees: Forest, child: Tensor, threshold: Tensor, active: Tensor) -> Tensor:
    """Whether the coin of `child` [B] is below `threshold`; a node has one coin, however many leaves are below it."""
    return dice.below(dice.place("accept", child), threshold, active)


def last_law(target: Tensor, node: Tensor, residual: Tensor, stopped: Tensor, rejected: Tensor) -> Tensor:
    """The law of the token after the path [B, V]: the residual if all children were rejected, else the node's own law.

    Args:
        target: [B, N, V]; the law after each node.
        node: int64 [B]; the last accepted node.
        residual: [B, V]; the residual after the rejections of the last level that had children.
        stopped: bool [B]; whether `node` has children, all of them rejected.
        rejected: int64 [B]; the last rejected child of the last level that had children, 0 for none.
    """
    row = target[torch.arange(len(node), device=node.device), node]
    return torch.where(stopped[:, None], residual, row)


def bonus_place(dice: Coins, node: Tensor, rejected: Tensor) -> Tensor:
    """The place of the coin of the token after the path; `rejected` [B] is the last rejected node, 0 for none."""
    return dice.place("bonus", node)


def own_decision(path: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """The accepted rows and the token after them, unchanged: an engine of one rank follows its own decision."""
    return path, token


def own_coins(uniforms: Tensor) -> Tensor:
    """The coins of each request [B, coins], unchanged: every request has its own coins."""
    return uniforms


@dataclass(frozen=True)
class SamplingSeams:
    """The functions and methods of the engine's sampling; the defaults are the fault-free engine.

    A planted fault replaces a function, or is a subclass with another method.

    Attributes:
        scores: From target logits to the scores that greedy decoding compares.
        target_law: From target logits to laws.
        bonus_law: From target logits to the law of the token after the path, used where no residual replaces it.
        hand_over: From the laws of the draft to the proposals that the verifier receives.
        history: From trees, prompt and output to the history before each node.
        residual: From a law to its residual after a rejection.
        accepts: One acceptance test.
        last_law: The law of the token after the path.
        bonus_place: The place of the coin of the token after the path.
        own_coins: The coins of each request.
        inverse: From a coin and weights to a token.
        verifier: The whole verification, in place of the program of the rule: from trees, the target's laws and the
            proposals [B, N, V] and the coins to accepted rows [B, height + 1], root first, then -1, and the token after
            them [B]. None for the program.
        decide: What runs the program of the rule, with the arguments and the result of `verify.by_rule`; None for that
            function itself.
        batched: The verification of a batch of requests whose questions are of one kind: from the questions to the
            accepted rows of each, root first, and the token after them. None to verify requests one by one.
        agree: From accepted rows [B, height + 1] and the token after them [B] to those that the engine follows.
        masks: From a guide and a tree with its tokens to the grammar's masks.
        ranks: The functions of a target over several ranks.
    """

    scores: Callable[[Tensor, Sampling, Stops, History], Tensor] = processing.scores
    target_law: Law = processing.law
    bonus_law: Law = processing.law
    hand_over: Callable[[Tensor, Tensor, Sampling], Tensor] = hand_over
    history: Callable[[Forest, tuple[int, ...], tuple[int, ...], Sampling, int], History] = processing.history
    residual: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = residual
    accepts: Callable[[Coins, Forest, Tensor, Tensor, Tensor], Tensor] = accepts
    last_law: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] = last_law
    bonus_place: Callable[[Coins, Tensor, Tensor], Tensor] = bonus_place
    own_coins: Callable[[Tensor], Tensor] = own_coins
    inverse: Inverse = coins.inverse
    verifier: Callable[[Forest, Tensor, Tensor, Coins], tuple[Tensor, Tensor]] | None = None
    decide: Callable[..., tuple[Tensor, Tensor, Tensor]] | None = None
    batched: Callable[[list[Question], "SamplingSeams"], list[tuple[list[int], int]]] | None = None
    agree: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = own_decision
    masks: Callable[[Guide, Shape, list[int]], Masks] = guide.masks
    ranks: RankSeams = RANK_SEAMS

    def certain(self, token: Tensor, scores: Tensor, law: Callable[[], Tensor]) -> Tensor:
        """The proposal of a deterministic draft: one-hot at `token`, [B, V], whatever `scores` [B, V] ranked the token.

        `law` would compute the law of the scores, and is not called: temperature, top-k, top-p and min-p leave the best
        tokens the best, so that a draft which draws nothing skips them (arXiv 2508.08192, 3.2).
        """
        return torch.nn.functional.one_hot(token, scores.shape[-1]).to(scores.dtype)

    def of_node(self, proposal: Tensor, node: Tensor) -> Tensor:
        """The rows [B, V] of `proposal` [B, N, V] at the nodes `node` [B]."""
        return proposal[torch.arange(len(node), device=node.device), node]

    def block_residual(self, row: Tensor, offered: Tensor, pi: Tensor) -> Tensor:
        """relu(pi * row - offered), [B, V], not normalised: the residual of block verification (Sun et al. 2024).

        Args:
            row: [B, V]; the target's law after a node.
            offered: [B, V]; the law from which the token below that node was drawn.
            pi: [B]; the weight of the block up to that node.
        """
        return (pi[:, None] * row - offered).clamp(min=0)

    def block_ratio(self, row: Tensor, offered: Tensor, pi: Tensor) -> Tensor:
        """The probability [B] that a block may end at a node with a child: m / (m + 1 - pi).

        m is the mass of `block_residual`.
        """
        mass = (pi[:, None] * row - offered).clamp(min=0).sum(-1)
        return torch.where(mass + 1 - pi > 0, mass / (mass + 1 - pi), torch.ones_like(mass))

    def joint_ratio(self, pi: Tensor, ratio: Tensor) -> Tensor:
        """min(1, pi * ratio) [B]: the joint ratio of a path, from that of the path above it and p(x)/q(x) of its end.

        At most 1 at every node, not at the end alone (Sun et al. 2024, algorithm 2).
        """
        return (pi * ratio).clamp(max=1.0)

    def possible(self, threshold: Tensor, share: Tensor) -> Tensor:
        """`threshold` [B] of a lossy rule, 0 where the target gives the token no probability: `share` [B] is p(x)."""
        return torch.where(share > 0, threshold, torch.zeros_like(threshold))

    def mixed_ratio(self, ratio: Tensor, weight: float) -> Tensor:
        """v(x)/q(x) [B] of the mixture v = weight p + (1 - weight) q, from `ratio` = p(x)/q(x) [B] (DIVERSED)."""
        return 1.0 - weight + weight * ratio

    def window_accepted(self, following: list[Tensor], decision: Tensor, window: int) -> Tensor:
        """Whether the next `window` nodes were all accepted, bool [B] (FLy).

        Args:
            following: The decisions on the next nodes, bool [B] each; fewer than `window` at the end of the chain, and
                False for a node that a request lacks.
            decision: The decision on the node itself, bool [B].
            window: The number of nodes.
        """
        if len(following) < window:
            return torch.zeros_like(decision)
        return torch.stack(following).all(0)

    def emitted(self, token: Tensor, row: Tensor) -> Tensor:
        """The law [B, V] of the token after a node whose drawn `token` [B] no child carries: that token itself."""
        # Not one_hot: on the CPU torch reads the smallest and the largest token back to the host.
        return (torch.arange(row.shape[-1], device=token.device) == token[:, None]).to(row.dtype)

    def sibling_law(self, proposal: Tensor, tried_tokens: Tensor, removed: bool) -> Tensor:
        """The law of the next sibling [B, V]; if siblings are drawn without replacement, `tried_tokens` are removed."""
        return without(proposal, tried_tokens) if removed else proposal

    def below(self, coin: Tensor, threshold: Tensor) -> Tensor:
        """Whether each coin is below its threshold; strictly: a threshold of 0 accepts no coin (SGLang #35798)."""
        return coin < threshold
