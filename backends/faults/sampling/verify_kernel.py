"""Faults of the kernel that verifies drawn tokens: its inputs, rows and sums."""

from dataclasses import replace

import torch
from torch import Tensor

from specverify.backends.engine.sampling.processing import History, widen
from specverify.backends.engine.sampling.seams import SamplingSeams
from specverify.backends.faults.fault import Fault
from specverify.backends.faults.sampling.rejection import in_sampling
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.trace import Stage

TILE = 2
"""The number of token ids in a tile; small, because the vocabularies of drawn cases are small."""


def logits_for_probabilities(seams: SamplingSeams) -> SamplingSeams:
    """Logits divided by the temperature are handed over as probabilities."""

    def target_law(logits: Tensor, sampling: Sampling, stops: Stops, past: History | None) -> Tensor:
        scores = widen(logits) if past is None else seams.scores(logits, sampling, stops, past)
        return scores / sampling.temperature

    return replace(seams, target_law=target_law)


def proposal_of_row_after(seams: SamplingSeams) -> SamplingSeams:
    """The proposal of a token is read one row further on; the last row keeps its own."""

    def of_node(proposal: Tensor, node: Tensor) -> Tensor:
        return seams.of_node(proposal, (node + 1).clamp(max=proposal.shape[1] - 1))

    return replace(seams, of_node=of_node)


def last_tile_lost(seams: SamplingSeams) -> SamplingSeams:
    """The residual's total lacks the sum of the last tile, so no coin reaches the ids in that tile."""

    def residual(law: Tensor, proposal: Tensor, token: Tensor, row: Tensor) -> Tensor:
        right = seams.residual(law, proposal, token, row)
        # The first id of the last tile.
        begin = (right.shape[-1] - 1) // TILE * TILE
        reached_part = right * (torch.arange(right.shape[-1], device=right.device) < begin)
        total = reached_part.sum(-1, keepdim=True)
        return torch.where(total > 0, reached_part / total, right)

    return replace(seams, residual=residual)


def block_residual_of_token(seams: SamplingSeams) -> SamplingSeams:
    """A block is accepted by its joint ratio, but its last token is drawn from the residual of one token."""

    def block_residual(row: Tensor, offered_law: Tensor, pi: Tensor) -> Tensor:
        # A weight of 1 in place of the block's weight gives the residual of a single token.
        return seams.block_residual(row, offered_law, torch.ones_like(pi))

    return replace(seams, block_residual=block_residual)


def block_without_proposals(seams: SamplingSeams) -> SamplingSeams:
    """Tokens that were not drawn have no q; 1 stands in, and each coin is compared with the product of all p so far."""

    def block_ratio(row: Tensor, offered_law: Tensor, pi: Tensor) -> Tensor:
        # A one-hot proposal marks a token that was not drawn.
        absent = offered_law.max(-1).values == 1
        return torch.where(absent, pi, seams.block_ratio(row, offered_law, pi))

    return replace(seams, block_ratio=block_ratio)


FAULTS = (
    Fault(
        "logits-taken-for-probabilities",
        Stage.SCORED,
        "Logits are handed to the verification of sampled tokens, which reads them as probabilities.",
        "vllm-project/vllm-ascend PR #6685; catalogue BZ-040: logits interpreted as probabilities",
        "a request that samples",
        in_sampling(logits_for_probabilities),
    ),
    Fault(
        "proposal-of-row-after",
        Stage.ACCEPTED,
        "The proposal that a drafted token is held against is that of the row after its own.",
        "huggingface/transformers PR #28166; catalogue BZ-105: indexing error in speculative sampling",
        "a rule that reads proposals, and a drafted row before another",
        in_sampling(proposal_of_row_after),
    ),
    Fault(
        "last-tile-of-residual-lost",
        Stage.ACCEPTED,
        "The partial sum of the last tile is missing from the residual's total.",
        "flashinfer-ai/flashinfer PR #424; catalogue BZ-088: missing barrier between block reductions",
        "a rejection, and a vocabulary larger than a tile",
        in_sampling(last_tile_lost),
    ),
    Fault(
        "block-residual-of-one-token",
        Stage.ACCEPTED,
        "A block is accepted by its joint ratio, and its last token drawn from the residual of a single token.",
        "vllm-project/vllm-ascend issue #7807, PR #7808; catalogue BZ-038: block acceptance with unmodified residual",
        "rule block, drawn tokens, two levels, and an accepted block whose weight is below 1",
        in_sampling(block_residual_of_token),
        {"top-k": "a certain proposal leaves of pi p, as of p, all but its token, and both are normalised"},
    ),
    Fault(
        "block-ratio-without-proposals",
        Stage.ACCEPTED,
        "Block verification runs without proposals: each coin meets the product of the target's probabilities so far.",
        "vllm-project/vllm-ascend PR #7603; catalogue BZ-163: block verification though draft probabilities are absent",
        "rule block, tokens that were not drawn, two levels",
        in_sampling(block_without_proposals),
        {
            "without-replacement": "tokens are drawn: their proposals are there",
            "with-replacement": "tokens are drawn: their proposals are there",
        },
    ),
)
