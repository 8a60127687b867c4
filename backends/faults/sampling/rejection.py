"""Faults of sampled acceptance: the acceptance ratio, and the last token's law.

After a rejection the last token must follow the residual relu(p - q), normalised (arXiv 2302.01318).
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from specverify.backends.engine.sampling.coins import Coins
from specverify.backends.engine.sampling.forest import Forest
from specverify.backends.engine.sampling.seams import SamplingSeams
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import Fault
from specverify.reference.trace import Stage


def in_sampling(change: Callable[[SamplingSeams], SamplingSeams]) -> Callable[[Seams], Seams]:
    """A patch of the sampling seams, as a patch of the engine's seams."""
    return lambda seams: replace(seams, sampling=change(seams.sampling))


def _rows(target: Tensor, nodes: Tensor) -> Tensor:
    """The target's law [B, V] at the nodes `nodes` [B]."""
    return target[torch.arange(len(nodes), device=nodes.device), nodes]


def stale_residual(seams: SamplingSeams) -> SamplingSeams:
    """The residual of the last level with a rejection is kept, although a later child of that level was accepted."""

    def last_law(
        target: Tensor, nodes: Tensor, remaining: Tensor, has_stopped: Tensor, rejected_node: Tensor
    ) -> Tensor:
        return torch.where((has_stopped | (rejected_node > 0))[:, None], remaining, _rows(target, nodes))

    return replace(seams, last_law=last_law)


def zero_only(seams: SamplingSeams) -> SamplingSeams:
    """After a rejection only the rejected token is removed from p, as if q were certain of it."""

    def residual(law: Tensor, proposal: Tensor, token: Tensor, row: Tensor) -> Tensor:
        remaining = law.scatter(1, token[:, None], 0.0)
        total = remaining.sum(-1, keepdim=True)
        return torch.where(total > 0, remaining / total, row)

    return replace(seams, residual=residual)


def sibling_kept(seams: SamplingSeams) -> SamplingSeams:
    """Earlier siblings stay in q, although siblings were drawn without replacement."""
    return replace(seams, sibling_law=lambda proposal, tried, removed: proposal)


def once_per_leaf(seams: SamplingSeams) -> SamplingSeams:
    """A node that several leaves share is tested again for the second leaf, with a fresh coin."""

    def accepts(dice: Coins, trees: Forest, child: Tensor, threshold: Tensor, open_requests: Tensor) -> Tensor:
        accepted = seams.accepts(dice, trees, child, threshold, open_requests)
        forks = (trees.children[trees.requests(), child] > 0).sum(-1) > 1
        retried = open_requests & ~accepted & forks
        # The coin of kind `order` serves as the fresh one, since it has a place of its own on the tape.
        return accepted | (dice.below(dice.place("order", child), threshold, retried) & retried)

    return replace(seams, accepts=accepts)


def row_zero(seams: SamplingSeams) -> SamplingSeams:
    """After a rejection the last token comes from row 0 of the target, wherever the path ended."""

    def last_law(
        target: Tensor, nodes: Tensor, remaining: Tensor, has_stopped: Tensor, rejected_node: Tensor
    ) -> Tensor:
        law = seams.last_law(target, nodes, remaining, has_stopped, rejected_node)
        return torch.where((has_stopped & (nodes > 0))[:, None], target[:, 0], law)

    return replace(seams, last_law=last_law)


def row_after(seams: SamplingSeams) -> SamplingSeams:
    """After a rejection the last token comes from the target's row at the rejected token."""

    def last_law(
        target: Tensor, nodes: Tensor, remaining: Tensor, has_stopped: Tensor, rejected_node: Tensor
    ) -> Tensor:
        law = seams.last_law(target, nodes, remaining, has_stopped, rejected_node)
        return torch.where((has_stopped & (rejected_node > 0))[:, None], _rows(target, rejected_node), law)

    return replace(seams, last_law=last_law)


def bonus_from_p(seams: SamplingSeams) -> SamplingSeams:
    """The last token always comes from p, so a rejected token may come back."""

    def last_law(
        target: Tensor, nodes: Tensor, remaining: Tensor, has_stopped: Tensor, rejected_node: Tensor
    ) -> Tensor:
        return _rows(target, nodes)

    return replace(seams, last_law=last_law)


def softmax_of_residual(seams: SamplingSeams) -> SamplingSeams:
    """The clamped difference goes through softmax instead of a division by its sum."""

    def residual(law: Tensor, proposal: Tensor, token: Tensor, row: Tensor) -> Tensor:
        return (law - proposal).clamp(min=0).softmax(-1)

    return replace(seams, residual=residual)


def ratio_reversed(seams: SamplingSeams) -> SamplingSeams:
    """A token is accepted with probability min(1, q/p)."""

    def accepts(dice: Coins, trees: Forest, child: Tensor, threshold: Tensor, open_requests: Tensor) -> Tensor:
        # The bound avoids a division by zero; any coin lies below its inverse.
        return seams.accepts(dice, trees, child, 1.0 / threshold.clamp(min=1e-30), open_requests)

    return replace(seams, accepts=accepts)


def residual_by_arg_max(seams: SamplingSeams) -> SamplingSeams:
    """The token after a rejection is the most probable token of the residual."""

    def last_law(
        target: Tensor, nodes: Tensor, remaining: Tensor, has_stopped: Tensor, rejected_node: Tensor
    ) -> Tensor:
        law = seams.last_law(target, nodes, remaining, has_stopped, rejected_node)
        best = torch.nn.functional.one_hot(law.argmax(-1), law.shape[-1]).to(law.dtype)
        return torch.where(has_stopped[:, None], best, law)

    return replace(seams, last_law=last_law)


def acceptance_fault(
    name: str,
    sentence: str,
    source: str,
    trigger: str,
    plant: Callable[[SamplingSeams], SamplingSeams],
    **harmless: str,
) -> Fault:
    """A fault of stage accepted; `harmless` names the kinds of draft under which it changes no law, with the proof."""
    reasons_by_kind = {kind.replace("_", "-"): why for kind, why in harmless.items()}
    return Fault(name, Stage.ACCEPTED, sentence, source, trigger, in_sampling(plant), reasons_by_kind)


ONE_HOT = "relu(p - e_x) over its sum is p with x zeroed, over its sum"
"""The proof that removing the token alone is right for a proposal that is certain of it."""
LAW_WITH_REPLACEMENT = "the law of a sibling drawn with replacement is q itself"
"""The proof that keeping siblings in q is right for draws with replacement."""

FAULTS = (
    acceptance_fault(
        "stale-residual-for-bonus",
        "The bonus after full acceptance is drawn from the residual of an earlier rejection.",
        "catalogue BZ-001: bonus token drawn from stale residual after the whole path was accepted",
        "an accepted child whose sibling was rejected",
        stale_residual,
    ),
    acceptance_fault(
        "residual-zeroes-token-only",
        "After a rejection only the rejected token leaves p; q is not subtracted.",
        "the residual is relu(p - q), not p without the token (arXiv 2302.01318)",
        "a rejected token whose q is not certain",
        zero_only,
        top_k=ONE_HOT,
    ),
    acceptance_fault(
        "sibling-not-removed-from-q",
        "The second sibling is tested against q with the first one still in it.",
        "without replacement, an earlier sibling leaves q (arXiv 2305.09781)",
        "two siblings drawn without replacement, the first rejected",
        sibling_kept,
        top_k="a one-hot proposal holds no other sibling",
        with_replacement=LAW_WITH_REPLACEMENT,
    ),
    acceptance_fault(
        "shared-node-tested-per-leaf",
        "A node that several leaves share is tested once for each of them.",
        "catalogue BZ-003: shared prefix node tested once per leaf path",
        "a rejected child with two children",
        once_per_leaf,
    ),
    acceptance_fault(
        "residual-from-row-zero",
        "After a rejection below the root the token is drawn from the root's row.",
        "batched verifiers index the target's rows by node; here every one reads the root's",
        "a rejection below an accepted node",
        row_zero,
    ),
    acceptance_fault(
        "resampled-from-row-after",
        "After a rejection the token is drawn from the row of the rejected token.",
        "catalogue BZ-129: rejection handled one iteration late",
        "a rejection",
        row_after,
    ),
    acceptance_fault(
        "bonus-from-whole-law",
        "After a rejection the token is drawn from p instead of the residual.",
        "after a rejection the residual is drawn from, not p (arXiv 2302.01318)",
        "a rejection",
        bonus_from_p,
    ),
    acceptance_fault(
        "residual-through-softmax",
        "The residual goes through softmax instead of being normalised.",
        "catalogue BZ-104: residual passed through softmax instead of normalisation",
        "a rejection",
        softmax_of_residual,
    ),
    acceptance_fault(
        "acceptance-ratio-reversed",
        "A token is accepted with probability q/p.",
        "speculative sampling accepts with probability min(1, p/q) (arXiv 2302.01318)",
        "a drafted token whose p is not its q",
        ratio_reversed,
    ),
    acceptance_fault(
        "residual-by-arg-max",
        "The token after a rejection is the best of the residual.",
        "the residual is sampled, not maximised (arXiv 2302.01318)",
        "a rejection whose residual has two tokens",
        residual_by_arg_max,
    ),
)
