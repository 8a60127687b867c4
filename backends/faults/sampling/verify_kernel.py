"""Faults of the kernel that verifies drawn tokens: its inputs, rows and sums."""

import torch
from torch import Tensor

from specverify.backends.engine.sampling.processing import History, widen
from specverify.backends.engine.sampling.seams import SamplingSeams
from specverify.backends.faults.fault import accepted_fault, in_place_of, scored_fault
from specverify.reference.sampling import Sampling, Stops

TILE = 2
"""The number of token ids in a tile; small, because the vocabularies of drawn cases are small."""


@scored_fault(
    "logits-taken-for-probabilities",
    "vllm-project/vllm-ascend PR #6685; catalogue BZ-040: logits interpreted as probabilities",
    "a request that samples",
)
@in_place_of("sampling.target_law")
def logits_for_probabilities(
    seams: SamplingSeams, logits: Tensor, sampling: Sampling, stops: Stops, past: History | None
) -> Tensor:
    """Logits are handed to the verification of sampled tokens, which reads them as probabilities."""
    scores = widen(logits) if past is None else seams.scores(logits, sampling, stops, past)
    return scores / sampling.temperature


@accepted_fault(
    "proposal-of-row-after",
    "huggingface/transformers PR #28166; catalogue BZ-105: indexing error in speculative sampling",
    "a rule that reads proposals, and a drafted row before another",
)
@in_place_of("sampling.of_node")
def proposal_of_row_after(seams: SamplingSeams, proposal: Tensor, node: Tensor) -> Tensor:
    """The proposal that a drafted token is held against is that of the row after its own."""
    return seams.of_node(proposal, (node + 1).clamp(max=proposal.shape[1] - 1))


@accepted_fault(
    "last-tile-of-residual-lost",
    "flashinfer-ai/flashinfer PR #424; catalogue BZ-088: missing barrier between block reductions",
    "a rejection, and a vocabulary larger than a tile",
)
@in_place_of("sampling.residual")
def last_tile_lost(seams: SamplingSeams, law: Tensor, proposal: Tensor, token: Tensor, row: Tensor) -> Tensor:
    """The partial sum of the last tile is missing from the residual's total."""
    right = seams.residual(law, proposal, token, row)
    # The first id of the last tile.
    begin = (right.shape[-1] - 1) // TILE * TILE
    reached_part = right * (torch.arange(right.shape[-1], device=right.device) < begin)
    total = reached_part.sum(-1, keepdim=True)
    return torch.where(total > 0, reached_part / total, right)


@accepted_fault(
    "block-residual-of-one-token",
    "vllm-project/vllm-ascend issue #7807, PR #7808; catalogue BZ-038: block acceptance with unmodified residual",
    "rule block, drawn tokens, two levels, and an accepted block whose weight is below 1",
    {"top-k": "a certain proposal leaves of pi p, as of p, all but its token, and both are normalised"},
)
@in_place_of("sampling.block_residual")
def block_residual_of_token(seams: SamplingSeams, row: Tensor, offered_law: Tensor, pi: Tensor) -> Tensor:
    """A block is accepted by its joint ratio, and its last token drawn from the residual of a single token."""
    # A weight of 1 in place of the block's weight gives the residual of a single token.
    return seams.block_residual(row, offered_law, torch.ones_like(pi))


@accepted_fault(
    "block-ratio-without-proposals",
    "vllm-project/vllm-ascend PR #7603; catalogue BZ-163: block verification though draft probabilities are absent",
    "rule block, tokens that were not drawn, two levels",
    {
        "without-replacement": "tokens are drawn: their proposals are there",
        "with-replacement": "tokens are drawn: their proposals are there",
    },
)
@in_place_of("sampling.block_ratio")
def block_without_proposals(seams: SamplingSeams, row: Tensor, offered_law: Tensor, pi: Tensor) -> Tensor:
    """Block verification runs without proposals: each coin meets the product of the target's probabilities so far.

    1 stands in for the q of tokens that were not drawn.
    """
    # A one-hot proposal marks a token that was not drawn.
    absent = offered_law.max(-1).values == 1
    return torch.where(absent, pi, seams.block_ratio(row, offered_law, pi))


@accepted_fault(
    "block-ratio-not-capped",
    "vllm-project/vllm PR #46781: the ratio of a block is cut to 1 at every prefix",
    "rule block or traversal, drawn tokens, and a node whose p is above its q before a node whose p is below",
    {"top-k": "a certain proposal is never below p, so that no ratio is above 1"},
)
@in_place_of("sampling.joint_ratio")
def ratio_not_capped(seams: SamplingSeams, pi: Tensor, ratio: Tensor) -> Tensor:
    """The ratios of a block are multiplied first, and cut to 1 where a coin is compared with them alone."""
    return pi * ratio
