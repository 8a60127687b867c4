"""The engine's seams as one rank plays them.

The target is sharded, and decisions are shared by all ranks.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from specverify.backends.engine.collectives import Group
from specverify.backends.engine.lower_tree import TreeTensors
from specverify.backends.engine.model.causal_lm import CausalLm
from specverify.backends.engine.ranks.by_requests import RequestRanks, SplitVerify, decide_by_requests
from specverify.backends.engine.ranks.draft_ranks import parts_of_drafts, request_on_ranks, tap_on_ranks
from specverify.backends.engine.ranks.shards import ShardedLm
from specverify.backends.engine.sampling import coins, processing
from specverify.backends.engine.sampling.seams import Law, SamplingSeams
from specverify.backends.engine.seams import Seams


def seams_in_step(seams: Seams, group: Group, draft_ranks: int = 0) -> Seams:
    """The seams of rank `group.rank`, where so many of the ranks have the draft (`Case.draft_ranks`)."""
    ranks = seams.sampling.ranks
    if draft_ranks:
        seams = replace(
            seams,
            draft_part=parts_of_drafts(group, ranks, draft_ranks),
            request=request_on_ranks(seams.request, group, ranks),
            tap=tap_on_ranks(seams.tap, group, ranks),
            captured_drafts=None,  # each rank would fill the levels of a batch in another order than they are sent
        )

    def network(model: CausalLm) -> CausalLm:
        return ShardedLm(seams.network(model), group, ranks)

    def walk(tensors: TreeTensors, scores: Tensor) -> tuple[list[int], int]:
        choice = ranks.argmax(group, scores)
        # The walk reads nothing but the arg-max of each row.
        path, bonus = seams.walk(tensors, torch.nn.functional.one_hot(choice, scores.shape[-1]).to(scores.dtype))
        decision = torch.full((1, len(scores) + 1), -1)
        decision[0, : len(path)] = torch.tensor(path)
        decision[0, -1] = bonus
        rows = [int(row) for row in ranks.agree(group, decision, True)[0]]
        return [row for row in rows[:-1] if row >= 0], rows[-1]

    return replace(seams, network=network, walk=walk, sampling=sampling_in_step(seams.sampling, group))


def sampling_in_step(seams: SamplingSeams, group: Group) -> SamplingSeams:
    """The sampling seams of rank `group.rank`; functions that a planted fault has replaced stay in their place."""
    ranks = seams.ranks
    own_coins = partial(_own_coins, seams, group)
    if isinstance(ranks, RequestRanks):
        decide = partial(decide_by_requests, group, ranks)
        return replace(seams, decide=decide, batched=SplitVerify(group=group, ranks=ranks), own_coins=own_coins)

    def agreed(path: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        path, token = seams.agree(path, token)
        decision = ranks.agree(group, torch.cat([path, token[:, None]], 1), False)
        return decision[:, :-1], decision[:, -1]

    due: list[bool] = []

    def bonus_place(dice: coins.Coins, node: Tensor, rejected: Tensor) -> Tensor:
        due.append(True)
        return seams.bonus_place(dice, node, rejected)

    def inverse(coin: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # The token after the path alone is drawn over parts: the draft runs whole on every rank.
        if not due or seams.inverse is not coins.inverse:
            return seams.inverse(coin, weights)
        due.clear()
        return ranks.draw(group, coin, weights)

    sharded = partial(processing.law, softmax=lambda logits: ranks.softmax(group, logits))
    target_law = _unless_replaced(seams.target_law, sharded)
    # Laws that were one function stay one, so that they are still computed once.
    bonus_law = target_law if seams.bonus_law is seams.target_law else _unless_replaced(seams.bonus_law, sharded)
    return replace(
        seams,
        target_law=target_law,
        bonus_law=bonus_law,
        inverse=inverse,
        bonus_place=bonus_place,
        own_coins=own_coins,
        agree=agreed,
    )


def _own_coins(seams: SamplingSeams, group: Group, uniforms: Tensor) -> Tensor:
    return seams.ranks.own_coins(group, seams.own_coins(uniforms))


def _unless_replaced(law: Law, sharded: Callable[..., Tensor]) -> Law:
    return sharded if law is processing.law else law
