"""One verification of a batch: a rule walks the trees, and the token after the path is drawn."""

from dataclasses import dataclass

import torch
from torch import Tensor

from backends.engine.sampling.coins import Coins
from backends.engine.sampling.forest import Forest
from backends.engine.sampling.rules import PROGRAMS
from backends.engine.sampling.seams import SamplingSeams
from reference.rules import Rule


@dataclass(frozen=True)
class Accepted:
    """The acceptance of B requests.

    Attributes:
        path: int64 [B, height + 1]; accepted rows, root first, then -1.
        tokens: int64 [B, height + 1]; the tokens emitted, then -1: those of the path below the root, and the last.
        bonus: int64 [B]; the token after the path.
        last: [B, V]; the law it was drawn from.
    """

    path: Tensor
    tokens: Tensor
    bonus: Tensor
    last: Tensor


def verify(
    trees: Forest,
    target: Tensor,
    proposal: Tensor,
    dice: Coins,
    rule: Rule,
    removed: bool,
    seams: SamplingSeams,
    bonus: Tensor | None = None,
) -> Accepted:
    """Accept by `rule`, then draw the last token.

    Args:
        trees: The drafted trees.
        target: The target's law after each node [B, N, V].
        proposal: The law from which each node's token was drawn, before siblings were removed [B, N, V].
        dice: The coins.
        rule: The rule and its thresholds.
        removed: Whether tokens were drawn without replacement, so that a sibling's law lacks the earlier ones.
        seams: The functions that decide.
        bonus: The law after each node that the last token is drawn from where no residual stands in; `target` if None.
    """
    walk = PROGRAMS[rule.name](trees, target, proposal, dice, seams, rule, removed)
    rows = target if bonus is None else bonus
    last = seams.last_law(rows, walk.at, walk.left, walk.stopped, walk.rejected)
    every = torch.ones_like(walk.alive)
    token = dice.choose(seams.bonus_place(dice, walk.at, walk.rejected), last, every)
    path = torch.stack(walk.path, 1)
    length = (path >= 0).sum(-1)
    below = torch.where(path[:, 1:] >= 0, trees.token.gather(1, path[:, 1:].clamp(min=0)), -1)
    tokens = torch.cat([below, torch.full_like(path[:, :1], -1)], 1).scatter(1, length[:, None] - 1, token[:, None])
    return Accepted(path, tokens, token, last)
