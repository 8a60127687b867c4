"""Sampling split over ranks by requests (arXiv 2508.08192, 3.2).

The batch is padded to a multiple of the ranks. Every rank holds the random numbers of the whole batch, decides for its
own slice of the requests with its own slice of the numbers, and the decisions are gathered. Those for requests that
only pad the batch are cut off. `RankSeams` splits each draw by the vocabulary in place of this.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from specverify.backends.engine.collectives import Group, RankSeams
from specverify.backends.engine.sampling.batched import Answers, BatchedVerify, PaddedBatch, PlacedCoins, Program
from specverify.backends.engine.sampling.coins import Coins
from specverify.backends.engine.sampling.forest import Forest
from specverify.backends.engine.sampling.seams import SamplingSeams
from specverify.backends.engine.sampling.verify import Decision, by_rule
from specverify.reference.rules import Rule


class RequestRanks(RankSeams):
    """Ranks that share sampling out by requests; a planted fault is a subclass with one wrong method."""

    def slice_of(self, group: Group, requests: int) -> tuple[int, int]:
        """The first request of this rank and the one after its last, in a batch padded to a multiple of the ranks."""
        size = -(-requests // group.size)
        return group.rank * size, (group.rank + 1) * size

    def share(self, group: Group, tensor: Tensor) -> Tensor:
        """This rank's slice of `tensor` [B, ...]; a request that pads the batch is a copy of the last one."""
        begin, end = self.slice_of(group, len(tensor))
        return tensor[torch.arange(begin, end, device=tensor.device).clamp(max=len(tensor) - 1)]

    def share_coins(self, group: Group, uniforms: Tensor) -> Tensor:
        """This rank's slice of the uniforms [B, coins], which every rank has drawn for the whole batch."""
        return self.share(group, uniforms)

    def gather(self, group: Group, decisions: Tensor, requests: int) -> Tensor:
        """The decisions [B, ...] of all `requests`, from this rank's slice of those of the padded batch."""
        # A transport need not carry booleans.
        plain = decisions.long() if decisions.dtype == torch.bool else decisions
        return torch.cat(group.all_gather(plain.contiguous()))[:requests].to(decisions.dtype)


REQUEST_RANKS = RequestRanks()
"""The fault-free split by requests; one object, so that seams without a fault are equal."""


def decide_by_requests(
    group: Group,
    ranks: RequestRanks,
    trees: Forest,
    target: Tensor,
    proposal: Tensor,
    dice: Coins,
    rule: Rule,
    removed: bool,
    seams: SamplingSeams,
    bonus: Tensor | None,
) -> Decision:
    """As `specverify.backends.engine.sampling.verify.by_rule`, each rank for its own slice of the requests."""
    requests = len(trees.token)
    share = partial(ranks.share, group)
    token, parent, children, depth, present = map(
        share, (trees.token, trees.parent, trees.children, trees.depth, trees.present)
    )
    own_trees = Forest(token, parent, children, depth, present, trees.height)
    own_dice = dice.part(ranks.share_coins(group, dice.uniforms), share)
    own_bonus = None if bonus is None else share(bonus)
    own_decision = by_rule(own_trees, share(target), share(proposal), own_dice, rule, removed, seams, own_bonus)
    path, last_token, last_law = (ranks.gather(group, part, requests) for part in own_decision)
    _gather_coins(group, dice, own_dice, lambda part: ranks.gather(group, part, requests))
    return path, last_token, last_law


def _gather_coins(group: Group, dice: Coins, own_dice: Coins, gather: Callable[[Tensor], Tensor]) -> None:
    """Note in `dice` what the coins of all ranks' slices decided."""
    # A program that stops early where nothing is left to decide reads fewer places on some ranks.
    counts = [int(count) for count in group.all_gather(torch.tensor([len(own_dice.spent)]))]
    empty = torch.zeros(len(own_dice.uniforms), dtype=torch.long, device=own_dice.uniforms.device)
    for number in range(max(counts)):
        place, active = own_dice.spent[number] if number < len(own_dice.spent) else (empty, empty.bool())
        dice.spent.append((gather(place), gather(active)))
    if own_dice.low is not None and own_dice.high is not None:
        dice.low, dice.high = gather(own_dice.low), gather(own_dice.high)


@dataclass(frozen=True)
class SplitVerify(BatchedVerify):
    """Acceptance for the requests of a batch, each rank for its own slice of them.

    Attributes:
        group: This rank's door to the others.
        ranks: How requests are shared out.
    """

    group: Group = field(kw_only=True)
    ranks: RequestRanks = field(kw_only=True)

    def ask(self, key: Program, batch: PaddedBatch) -> Answers:
        """See `BatchedVerify`; nothing is captured."""
        rule, removed, seams = key
        dice = PlacedCoins(batch.uniforms, batch.nodes, seams.below, seams.inverse)
        trees = Forest(batch.token, batch.parent, batch.children, batch.depth, batch.present, batch.height)
        path, token, _ = decide_by_requests(
            self.group, self.ranks, trees, batch.law, batch.proposal, dice, rule, removed, seams, batch.bonus
        )
        places, activities = zip(*dice.spent, strict=True)
        return path, token, torch.stack(places), torch.stack(activities)
