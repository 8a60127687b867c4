"""Faults of logits processing for the target's law and the draft's proposal.

Temperature, top-k, top-p, min-p, penalties or processors are skipped, misplaced or imprecise.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from specverify.backends.engine.sampling.processing import History
from specverify.backends.engine.sampling.seams import SamplingSeams
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import (
    accepted_fault,
    drafted_fault,
    emitted_fault,
    in_place_of,
    scored_fault,
)
from specverify.reference.sampling import Sampling, Stops

DETERMINISTIC = "a proposal that is certain of its token has no other probabilities"
"""The proof that a fault of the proposal is harmless for a draft that names its best tokens."""

PLAIN = Sampling(1.0)
"""Temperature 1 and no processing, so that the law is the softmax alone."""


@drafted_fault(
    "soft-law-for-ranked-tokens",
    "transformers #32867: argmax draft with soft q",
    "a model draft whose tokens are its best, at a temperature",
    {
        "without-replacement": "no token is merely ranked: every proposal is the law drawn from",
        "with-replacement": "no token is merely ranked: every proposal is the law drawn from",
    },
)
@in_place_of("sampling.certain")
def soft_for_certain(seams: SamplingSeams, token: Tensor, scores: Tensor, law: Callable[[], Tensor]) -> Tensor:
    """The draft names its best tokens but hands over its soft law, as if they had been drawn."""
    return law()


@drafted_fault(
    "proposal-before-truncation",
    "catalogue BZ-102: candidate generators return a q they did not sample from",
    "a drawn draft under top-k, top-p or min-p",
    {"top-k": DETERMINISTIC},
)
@in_place_of("sampling.hand_over")
def before_truncation(seams: SamplingSeams, drawn_from: Tensor, logits: Tensor, sampling: Sampling) -> Tensor:
    """The proposal handed over is the law before top-k and top-p; the token was drawn after them."""
    return (logits / sampling.temperature).softmax(-1)


@drafted_fault(
    "proposal-without-temperature",
    "q is the law that tokens were drawn from, after temperature (arXiv 2302.01318)",
    "a drawn draft at a temperature other than 1",
    {"top-k": DETERMINISTIC},
)
@in_place_of("sampling.hand_over")
def without_temperature(seams: SamplingSeams, drawn_from: Tensor, logits: Tensor, sampling: Sampling) -> Tensor:
    """The proposal handed over ignores the temperature at which the token was drawn."""
    return logits.softmax(-1)


@scored_fault(
    "target-law-under-default-settings",
    "catalogue BZ-010: target probabilities computed with default sampling parameters during scoring",
    "a temperature other than 1, or any processing",
)
@in_place_of("sampling.target_law")
def judged_under_default_settings(
    seams: SamplingSeams, logits: Tensor, sampling: Sampling, stops: Stops, past: History | None
) -> Tensor:
    """Drafted tokens are judged by the target's law under default settings."""
    return seams.target_law(logits, PLAIN, stops, past)


@accepted_fault(
    "bonus-row-unprocessed",
    "catalogue BZ-005: bonus token sampled without temperature/top-p/top-k",
    "full acceptance at a temperature other than 1, or under processing",
)
@in_place_of("sampling.bonus_law")
def bonus_unprocessed(
    seams: SamplingSeams, logits: Tensor, sampling: Sampling, stops: Stops, past: History | None
) -> Tensor:
    """The bonus token is sampled without temperature, top-p, top-k and processors."""
    return seams.bonus_law(logits, PLAIN, stops, past)


@accepted_fault(
    "bonus-without-temperature",
    "catalogue BZ-005: bonus sampled without temperature",
    "full acceptance at a temperature other than 1",
)
@in_place_of("sampling.bonus_law")
def bonus_without_temperature(
    seams: SamplingSeams, logits: Tensor, sampling: Sampling, stops: Stops, past: History | None
) -> Tensor:
    """The bonus after full acceptance is sampled at temperature 1."""
    return seams.bonus_law(logits, replace(sampling, temperature=1.0), stops, past)


@scored_fault(
    "top-p-in-bfloat16", "catalogue BZ-055: top_p cast to bfloat16 in the verification sampler", "top-p below 1"
)
@in_place_of("sampling.target_law")
def top_p_in_bfloat16(
    seams: SamplingSeams, logits: Tensor, sampling: Sampling, stops: Stops, past: History | None
) -> Tensor:
    """top_p is rounded to bfloat16 in the verifier, so that its nucleus is another."""
    coarse_top_p = float(torch.tensor(sampling.top_p).bfloat16())
    return seams.target_law(logits, replace(sampling, top_p=coarse_top_p), stops, past)


@scored_fault(
    "min-p-for-bonus-only",
    "catalogue BZ-016: min_p (argmax-invariant processors) skipped for verified tokens",
    "min-p above 0",
)
@in_place_of("sampling.target_law")
def min_p_for_bonus_only(
    seams: SamplingSeams, logits: Tensor, sampling: Sampling, stops: Stops, past: History | None
) -> Tensor:
    """min_p is skipped for verified tokens."""
    return seams.target_law(logits, replace(sampling, min_p=0.0), stops, past)


@scored_fault(
    "processors-see-path-one-late",
    "catalogue BZ-014: bad-words prefix matching reads draft tokens shifted by one",
    "penalties, bad words or a custom processor on a tree",
)
@in_place_of("sampling.target_law")
def path_one_late(
    seams: SamplingSeams, logits: Tensor, sampling: Sampling, stops: Stops, past: History | None
) -> Tensor:
    """Processors at a node see the tokens of the row before it instead of the node's own path."""
    if past is None:
        return seams.target_law(logits, sampling, stops, past)
    late = torch.cat([past.tail[..., :1], past.tail[..., :-1]], -1)
    # Row 0 has no row before it and keeps its own history.
    shifted_history = [torch.cat([rows[:, :1], rows[:, :-1]], 1) for rows in (past.seen_tokens, past.counts)]
    # The node's history is the one before it: seen tokens, counts, the tail and the whole sequence.
    history = replace(
        past,
        seen_tokens=shifted_history[0],
        counts=shifted_history[1],
        tail=late,
        sequence=lambda request, node: past.sequence(request, max(node - 1, 0)),
    )
    return seams.target_law(logits, sampling, stops, history)


@scored_fault(
    "last-vocabulary-entry-lost",
    "catalogue BZ-176: last vocabulary entry removed in nucleus/typical sampling",
    "a law that gives the last id any mass",
)
@in_place_of("sampling.target_law")
def last_id_lost(
    seams: SamplingSeams, logits: Tensor, sampling: Sampling, stops: Stops, past: History | None
) -> Tensor:
    """The last vocabulary entry is removed before sampling."""
    law = seams.target_law(logits, sampling, stops, past)
    law_without_last = law * (torch.arange(law.shape[-1], device=law.device) < law.shape[-1] - 1)
    total = law_without_last.sum(-1, keepdim=True)
    # A law with all its mass on the last id has nothing else to offer, and stays.
    return torch.where(total > 0, law_without_last / total, law)


@emitted_fault(
    "logprobs-over-whole-tree", "catalogue BZ-119: logprobs normalised over all positions", "a tree with a drafted node"
)
@in_place_of("logprobs")
def logprobs_over_tree(seams: Seams, logits: Tensor) -> Tensor:
    """Log-probabilities are normalised over all rows of the tree."""
    return seams.logprobs(logits.flatten()[None]).view_as(logits)
