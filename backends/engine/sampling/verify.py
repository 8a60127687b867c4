"""The verification of a batch of drafted trees.

An acceptance rule walks the trees, then the token after the accepted path is drawn.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specverify.backends.engine.sampling.coins import Coins
from specverify.backends.engine.sampling.forest import Forest
from specverify.backends.engine.sampling.rules import PROGRAMS
from specverify.backends.engine.sampling.seams import SamplingSeams
from specverify.reference.rules import Rule


@dataclass(frozen=True)
class Acceptance:
    """The accepted paths and tokens of B requests.

    Attributes:
        path: int64 [B, height + 1]; accepted rows, root first, then -1.
        tokens: int64 [B, height + 1]; the emitted tokens, then -1: the tokens of the path below the root, then `bonus`.
        bonus: int64 [B]; the token after the path.
        last: [B, V]; the law from which `bonus` was drawn; the target's after the path, where `seams.verifier` chose.
    """

    path: Tensor
    tokens: Tensor
    bonus: Tensor
    last: Tensor


Decision = tuple[Tensor, Tensor, Tensor]
"""Accepted rows [B, height + 1], root first, then -1; the token after them [B]; the law [B, V] it was drawn from."""


def verify(
    trees: Forest,
    target: Tensor,
    proposal: Tensor,
    dice: Coins,
    rule: Rule,
    removed: bool,
    seams: SamplingSeams,
    bonus: Tensor | None = None,
) -> Acceptance:
    """Accept by `rule`, then draw the token after the path.

    Args:
        trees: The drafted trees.
        target: The target's law after each node [B, N, V].
        proposal: The law from which each node's token was drawn, before siblings were removed [B, N, V].
        dice: The coins.
        rule: The rule and its thresholds.
        removed: Whether tokens were drawn without replacement, so that a sibling's law lacks the earlier tokens.
        seams: The functions that decide.
        bonus: The law after each node for the token after the path, used where no residual replaces it [B, N, V];
            `target` if None.
    """
    if seams.verifier is None:
        decide = seams.decide or by_rule
        path, token, last = decide(trees, target, proposal, dice, rule, removed, seams, bonus)
    else:
        path, token = seams.verifier(trees, target, proposal, dice)
        end = (path >= 0).sum(-1, keepdim=True) - 1
        last = target[trees.requests(), path.gather(1, end)[:, 0]]
    path, token = seams.agree(path, token)
    length = (path >= 0).sum(-1)
    # A path of n rows emits the n - 1 tokens below the root, and the bonus as its n-th token.
    below = torch.where(path[:, 1:] >= 0, trees.token.gather(1, path[:, 1:].clamp(min=0)), -1)
    tokens = torch.cat([below, torch.full_like(path[:, :1], -1)], 1).scatter(1, length[:, None] - 1, token[:, None])
    return Acceptance(path, tokens, token, last)


def by_rule(
    trees: Forest,
    target: Tensor,
    proposal: Tensor,
    dice: Coins,
    rule: Rule,
    removed: bool,
    seams: SamplingSeams,
    bonus: Tensor | None,
) -> Decision:
    """The decision of the engine's own program of the rule; arguments as of `verify`."""
    walk = PROGRAMS[rule.name](trees, target, proposal, dice, seams, rule, removed)
    rows = target if bonus is None else bonus
    last = seams.last_law(rows, walk.node, walk.residual, walk.stopped, walk.rejected)
    all_requests = torch.ones_like(walk.alive)
    token = dice.choose(seams.bonus_place(dice, walk.node, walk.rejected), last, all_requests)
    return torch.stack(walk.path, 1), token, last
