"""Children of a node: the best tokens of a draft's law, or tokens drawn from it, sibling after sibling."""

import torch
from torch import Tensor

from backends.engine.sampling.coins import Coins
from backends.engine.sampling.seams import SamplingSeams


def named(
    law: Tensor, rank: int, child: int, tried: Tensor, draws: str, dice: Coins, seams: SamplingSeams, asked: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The token of one child for B requests.

    Args:
        law: The draft's law at the parent [B, V].
        rank: 0 for the best token; only top-k asks.
        child: The child's row, whose draft coin draws it.
        tried: bool [B, V]; tokens that earlier siblings hold.
        draws: One of `reference.rules.DRAWS`.
        dice: The coins.
        seams: The functions that decide.
        asked: bool [B]; requests that want the child at all.

    Returns:
        token int64 [B]; whether there was one to name, bool [B]; and its proposal [B, V].
    """
    if draws == "top-k":
        best = torch.sort(law, descending=True, stable=True)
        token = best.indices[:, rank]
        return token, best.values[:, rank] > 0, seams.certain(token, law)
    left = law.masked_fill(tried, 0.0) if draws == "without-replacement" else law
    possible = left.sum(-1) > 0
    place = dice.place("draft", torch.full((len(law),), child, dtype=torch.long, device=law.device))
    return dice.choose(place, torch.where(possible[:, None], left, law), asked & possible), possible, law
