"""The naming of a drafted child's token.

The token is one of the best tokens of the draft's law, or is drawn from that law, sibling after sibling.
"""

import torch
from torch import Tensor

from specverify.backends.engine.sampling.coins import Coins
from specverify.backends.engine.sampling.seams import SamplingSeams


def draw_child(
    law: Tensor,
    rank: int,
    child: int,
    tried_tokens: Tensor,
    draws: str,
    dice: Coins,
    seams: SamplingSeams,
    active: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Name the token of one child for B requests.

    Args:
        law: The draft's law at the parent [B, V].
        rank: The rank of the token in the law, 0 for the best; only `top-k` uses it.
        child: The row of the child; the draft coin of this row draws the token.
        tried_tokens: bool [B, V]; the tokens of earlier siblings.
        draws: One of `specverify.reference.rules.DRAWS`.
        dice: The coins.
        seams: The functions that decide.
        active: bool [B]; the requests that have this child at all.

    Returns:
        token int64 [B]; whether a token with any probability was left, bool [B]; and the proposal [B, V].
    """
    if draws == "top-k":
        best = torch.sort(law, descending=True, stable=True)  # stable: equal probabilities stay in order of ids
        token = best.indices[:, rank]
        return token, best.values[:, rank] > 0, seams.certain(token, law, lambda: law)
    untried = law.masked_fill(tried_tokens, 0.0) if draws == "without-replacement" else law
    possible = untried.sum(-1) > 0
    place = dice.place("draft", torch.full((len(law),), child, dtype=torch.long, device=law.device))
    # Where nothing is left, the whole law stands in, so that the division by the total stays defined.
    return dice.choose(place, torch.where(possible[:, None], untried, law), active & possible), possible, law
