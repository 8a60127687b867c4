"""Faults of acceptance for many requests in one call: their padding and order."""

from dataclasses import replace
from functools import partial

from specverify.backends.engine.sampling.batched import BatchedVerify, PaddedBatch
from specverify.backends.faults.fault import accepted_fault, on_result_of

CAPTURED_BACKEND = "cpu-captured-sampling"

captured_fault = partial(accepted_fault, on=CAPTURED_BACKEND)

on_padded_batch = on_result_of(
    "sampling.batched.pad_questions",
    BatchedVerify,
    "a fault of acceptance for many requests in one call: this backend verifies them one by one",
)
"""A decorator for a function that changes the batch of questions before the captured call."""


@captured_fault(
    "batched-laws-of-request-before",
    "family of vLLM #49738, there of a grammar's rows: rows shifted into the next request",
    "two sampling requests in one step",
)
@on_padded_batch
def laws_of_neighbour(batch: PaddedBatch) -> PaddedBatch:
    """Each request is verified against the target's laws of the request before it in the batch."""
    return replace(batch, law=batch.law.roll(1, 0), bonus=batch.bonus.roll(1, 0))


@captured_fault(
    "batched-levels-rounded-down",
    "family of catalogue BZ-040: a kernel's shape rounded the wrong way",
    "a sampling request whose tree has three levels",
)
@on_padded_batch
def levels_rounded_down(batch: PaddedBatch) -> PaddedBatch:
    """The levels that a captured call walks are rounded down to a power of two: deeper nodes are never tried."""
    deepest = int(batch.depth.max())
    return replace(batch, height=max(1, 1 << deepest.bit_length() - 1 if deepest else 1))


@captured_fault(
    "batched-coins-by-widest-tape",
    "family of vLLM PR #35398: random numbers looked up by positions of another layout of the batch",
    "two sampling requests in one step whose trees are not of one size",
)
@on_padded_batch
def widest_tape(batch: PaddedBatch) -> PaddedBatch:
    """The coins of every request are placed by the largest number of nodes in the batch."""
    return replace(batch, nodes=batch.nodes.max().expand_as(batch.nodes))


@captured_fault(
    "batched-siblings-rounded-down",
    "family of catalogue BZ-040: a kernel's shape rounded the wrong way",
    "a sampling request whose tree has a node with three children",
)
@on_padded_batch
def siblings_rounded_down(batch: PaddedBatch) -> PaddedBatch:
    """The siblings that a captured call tries are rounded down to a power of two: the last ones are never tried."""
    most = int((batch.children > 0).sum(2).max())
    num_kept = 1 << most.bit_length() - 1 if most else 1
    return replace(batch, children=batch.children[:, :, :num_kept])


@captured_fault(
    "batched-proposals-of-request-before",
    "vLLM PR #41044: rows of draft probabilities packed without regard to the order of the batch",
    "two sampling requests in one step whose drafts have laws",
)
@on_padded_batch
def proposals_of_neighbour(batch: PaddedBatch) -> PaddedBatch:
    """Each request is verified against the draft's laws of the request before it in the batch."""
    return replace(batch, proposal=batch.proposal.roll(1, 0))
