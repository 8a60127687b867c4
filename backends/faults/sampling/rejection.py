"""Faults of sampled acceptance: its ratio, the law of the last token, its streams of random numbers.

After a rejection the last token must follow the residual relu(p - q), normalised (arXiv 2302.01318). An engine has a
stream for each purpose: drawing tokens, accepting them, drawing what replaces a rejected one. Streams with equal seeds,
or with equal seeds and offsets, give equal numbers. Where a draft is not drawn, nothing is shared.
"""

import torch
from torch import Tensor

from specverify.backends.engine.sampling.coins import Coins
from specverify.backends.engine.sampling.forest import Forest
from specverify.backends.engine.sampling.seams import SamplingSeams
from specverify.backends.faults.fault import accepted_fault, in_place_of


def _rows(target: Tensor, nodes: Tensor) -> Tensor:
    """The target's law [B, V] at the nodes `nodes` [B]."""
    return target[torch.arange(len(nodes), device=nodes.device), nodes]


ONE_HOT = "relu(p - e_x) over its sum is p with x zeroed, over its sum"
"""The proof that removing the token alone is right for a proposal that is certain of it."""
LAW_WITH_REPLACEMENT = "the law of a sibling drawn with replacement is q itself"
"""The proof that keeping siblings in q is right for draws with replacement."""


@accepted_fault(
    "stale-residual-for-bonus",
    "catalogue BZ-001: bonus token drawn from stale residual after the whole path was accepted",
    "an accepted child whose sibling was rejected",
)
@in_place_of("sampling.last_law")
def stale_residual(
    seams: SamplingSeams, target: Tensor, nodes: Tensor, remaining: Tensor, has_stopped: Tensor, rejected_node: Tensor
) -> Tensor:
    """The bonus after full acceptance is drawn from the residual of an earlier rejection."""
    return torch.where((has_stopped | (rejected_node > 0))[:, None], remaining, _rows(target, nodes))


@accepted_fault(
    "residual-zeroes-token-only",
    "the residual is relu(p - q), not p without the token (arXiv 2302.01318)",
    "a rejected token whose q is not certain",
    {"top-k": ONE_HOT},
)
@in_place_of("sampling.residual")
def zero_only(seams: SamplingSeams, law: Tensor, proposal: Tensor, token: Tensor, row: Tensor) -> Tensor:
    """After a rejection only the rejected token leaves p; q is not subtracted."""
    remaining = law.scatter(1, token[:, None], 0.0)
    total = remaining.sum(-1, keepdim=True)
    return torch.where(total > 0, remaining / total, row)


@accepted_fault(
    "sibling-not-removed-from-q",
    "without replacement, an earlier sibling leaves q (arXiv 2305.09781)",
    "two siblings drawn without replacement, the first rejected",
    {"top-k": "a one-hot proposal holds no other sibling", "with-replacement": LAW_WITH_REPLACEMENT},
)
@in_place_of("sampling.sibling_law")
def sibling_kept(seams: SamplingSeams, proposal: Tensor, tried_tokens: Tensor, removed: bool) -> Tensor:
    """The second sibling is tested against q with the first one still in it."""
    return proposal


@accepted_fault(
    "shared-node-tested-per-leaf",
    "catalogue BZ-003: shared prefix node tested once per leaf path",
    "a rejected child with two children",
)
@in_place_of("sampling.accepts")
def once_per_leaf(
    seams: SamplingSeams, dice: Coins, trees: Forest, child: Tensor, threshold: Tensor, open_requests: Tensor
) -> Tensor:
    """A node that several leaves share is tested once for each of them."""
    accepted = seams.accepts(dice, trees, child, threshold, open_requests)
    forks = (trees.children[trees.requests(), child] > 0).sum(-1) > 1
    retried = open_requests & ~accepted & forks
    # The coin of kind `order` serves as the fresh one, since it has a place of its own on the tape.
    return accepted | (dice.below(dice.place("order", child), threshold, retried) & retried)


@accepted_fault(
    "residual-from-row-zero",
    "batched verifiers index the target's rows by node; here every one reads the root's",
    "a rejection below an accepted node",
)
@in_place_of("sampling.last_law")
def row_zero(
    seams: SamplingSeams, target: Tensor, nodes: Tensor, remaining: Tensor, has_stopped: Tensor, rejected_node: Tensor
) -> Tensor:
    """After a rejection below the root the token is drawn from the root's row."""
    law = seams.last_law(target, nodes, remaining, has_stopped, rejected_node)
    return torch.where((has_stopped & (nodes > 0))[:, None], target[:, 0], law)


@accepted_fault("resampled-from-row-after", "catalogue BZ-129: rejection handled one iteration late", "a rejection")
@in_place_of("sampling.last_law")
def row_after(
    seams: SamplingSeams, target: Tensor, nodes: Tensor, remaining: Tensor, has_stopped: Tensor, rejected_node: Tensor
) -> Tensor:
    """After a rejection the token is drawn from the row of the rejected token."""
    law = seams.last_law(target, nodes, remaining, has_stopped, rejected_node)
    return torch.where((has_stopped & (rejected_node > 0))[:, None], _rows(target, rejected_node), law)


@accepted_fault(
    "bonus-from-whole-law", "after a rejection the residual is drawn from, not p (arXiv 2302.01318)", "a rejection"
)
@in_place_of("sampling.last_law")
def bonus_from_p(
    seams: SamplingSeams, target: Tensor, nodes: Tensor, remaining: Tensor, has_stopped: Tensor, rejected_node: Tensor
) -> Tensor:
    """After a rejection the token is drawn from p instead of the residual."""
    return _rows(target, nodes)


@accepted_fault(
    "residual-through-softmax",
    "catalogue BZ-104: residual passed through softmax instead of normalisation",
    "a rejection",
)
@in_place_of("sampling.residual")
def softmax_of_residual(seams: SamplingSeams, law: Tensor, proposal: Tensor, token: Tensor, row: Tensor) -> Tensor:
    """The residual goes through softmax instead of being normalised."""
    return (law - proposal).clamp(min=0).softmax(-1)


@accepted_fault(
    "acceptance-ratio-reversed",
    "speculative sampling accepts with probability min(1, p/q) (arXiv 2302.01318)",
    "a drafted token whose p is not its q",
)
@in_place_of("sampling.accepts")
def ratio_reversed(
    seams: SamplingSeams, dice: Coins, trees: Forest, child: Tensor, threshold: Tensor, open_requests: Tensor
) -> Tensor:
    """A token is accepted with probability q/p."""
    # The bound avoids a division by zero; any coin lies below its inverse.
    return seams.accepts(dice, trees, child, 1.0 / threshold.clamp(min=1e-30), open_requests)


@accepted_fault(
    "residual-by-arg-max",
    "the residual is sampled, not maximised (arXiv 2302.01318)",
    "a rejection whose residual has two tokens",
)
@in_place_of("sampling.last_law")
def residual_by_arg_max(
    seams: SamplingSeams, target: Tensor, nodes: Tensor, remaining: Tensor, has_stopped: Tensor, rejected_node: Tensor
) -> Tensor:
    """The token after a rejection is the best of the residual."""
    law = seams.last_law(target, nodes, remaining, has_stopped, rejected_node)
    best = torch.nn.functional.one_hot(law.argmax(-1), law.shape[-1]).to(law.dtype)
    return torch.where(has_stopped[:, None], best, law)


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
