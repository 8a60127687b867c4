"""Faults of random streams: a number that drew a token decides once more.

An engine has a stream for each purpose: drawing tokens, accepting them, drawing what replaces a rejected one. Streams
with equal seeds, or with equal seeds and offsets, give equal numbers. Where a draft is not drawn, nothing is shared.
"""

import torch
from torch import Tensor

from specverify.backends.engine.sampling.coins import Coins
from specverify.backends.engine.sampling.forest import Forest
from specverify.backends.engine.sampling.seams import SamplingSeams
from specverify.backends.faults.fault import accepted_fault, in_place_of

FRESH = "a token that was named, not drawn, leaves the number of its draw unread, so that the number is a fresh one"
"""The proof that sharing the numbers of a draft's draws is right where the draft draws nothing."""


def has_drawn(dice: Coins, place: Tensor) -> Tensor:
    """Whether the coin at `place` [B] has drawn a token; True for coins that do not note what they decided."""
    if dice.low is None:
        return torch.ones_like(place, dtype=torch.bool)
    has_drawn_token = torch.zeros_like(place, dtype=torch.bool)
    for spent_place, open_requests in dice.spent:
        has_drawn_token = has_drawn_token | (open_requests & (spent_place == place))
    return has_drawn_token


@accepted_fault(
    "acceptance-by-the-drafts-coin",
    "vllm-project/vllm PR #47386: the acceptance uniform is the Philox draw of the draft's noise at that position",
    "a draft that draws its tokens",
    {"top-k": FRESH},
)
@in_place_of("sampling.accepts")
def acceptance_follows_draw(
    seams: SamplingSeams, dice: Coins, trees: Forest, child: Tensor, threshold: Tensor, open_requests: Tensor
) -> Tensor:
    """The random number that drew a drafted token also decides whether it is accepted."""
    draft_place = dice.place("draft", child)
    place = torch.where(has_drawn(dice, draft_place), draft_place, dice.place("accept", child))
    return dice.below(place, threshold, open_requests)


@accepted_fault(
    "recovery-on-the-drafts-stream",
    "family of vllm-project/vllm PR #54282: drafts and recovered tokens draw from one random stream",
    "a draft that draws its tokens, and a rejected one",
    {"top-k": FRESH},
)
@in_place_of("sampling.bonus_place")
def recovery_begins_anew(seams: SamplingSeams, dice: Coins, node: Tensor, rejected_node: Tensor) -> Tensor:
    """The token after a rejection is drawn by the first number of the draft's stream: both have one seed."""
    first = dice.place("draft", torch.ones_like(rejected_node))
    draws_again = (rejected_node > 0) & has_drawn(dice, first)
    return torch.where(draws_again, first, seams.bonus_place(dice, node, rejected_node))


@accepted_fault(
    "noise-of-the-rejected-token-again",
    "vllm-project/vllm PR #54282, vllm-project/vllm-ascend PR #15739: a rejected draft token is replaced by"
    " the very noise that produced it",
    "a draft that draws its tokens, and a rejected one",
    {"top-k": FRESH},
)
@in_place_of("sampling.bonus_place")
def noise_twice(seams: SamplingSeams, dice: Coins, node: Tensor, rejected_node: Tensor) -> Tensor:
    """The noise that drew a rejected token also draws the token that replaces it."""
    draft_place = dice.place("draft", rejected_node)
    draws_again = (rejected_node > 0) & has_drawn(dice, draft_place)
    return torch.where(draws_again, draft_place, seams.bonus_place(dice, node, rejected_node))
