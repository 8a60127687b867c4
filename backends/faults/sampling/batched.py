"""Faults of acceptance for many requests in one call: their padding and order."""

from collections.abc import Callable
from dataclasses import replace

from specverify.backends.base import Unsupported
from specverify.backends.engine.sampling.batched import BatchedVerify, PaddedBatch
from specverify.backends.engine.sampling.question import Question
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import fault, faults_in
from specverify.reference.trace import Stage

CAPTURED_BACKEND = "cpu-captured-sampling"


def with_changed_batch(seams: Seams, wrong: Callable[[PaddedBatch], PaddedBatch]) -> Seams:
    """`seams` whose batches of questions are changed by `wrong` before the captured call.

    Raises:
        Unsupported: if the engine verifies requests one by one.
    """
    verify = seams.sampling.batched
    if not isinstance(verify, BatchedVerify):
        raise Unsupported("a fault of acceptance for many requests in one call: this backend verifies them one by one")
    right = verify.pad_questions

    def pad_questions(questions: list[Question]) -> PaddedBatch:
        return wrong(right(questions))

    return replace(seams, sampling=replace(seams.sampling, batched=replace(verify, pad_questions=pad_questions)))


@fault(
    "batched-laws-of-request-before",
    Stage.ACCEPTED,
    "family of vLLM #49738, there of a grammar's rows: rows shifted into the next request",
    "two sampling requests in one step",
    on=CAPTURED_BACKEND,
)
def laws_of_neighbour(seams: Seams) -> Seams:
    """Each request is verified against the target's laws of the request before it in the batch."""
    return with_changed_batch(
        seams, lambda batch: replace(batch, law=batch.law.roll(1, 0), bonus=batch.bonus.roll(1, 0))
    )


@fault(
    "batched-levels-rounded-down",
    Stage.ACCEPTED,
    "family of catalogue BZ-040: a kernel's shape rounded the wrong way",
    "a sampling request whose tree has three levels",
    on=CAPTURED_BACKEND,
)
def levels_rounded_down(seams: Seams) -> Seams:
    """The levels that a captured call walks are rounded down to a power of two: deeper nodes are never tried."""

    def wrong(batch: PaddedBatch) -> PaddedBatch:
        deepest = int(batch.depth.max())
        return replace(batch, height=max(1, 1 << deepest.bit_length() - 1 if deepest else 1))

    return with_changed_batch(seams, wrong)


@fault(
    "batched-coins-by-widest-tape",
    Stage.ACCEPTED,
    "family of vLLM PR #35398: random numbers looked up by positions of another layout of the batch",
    "two sampling requests in one step whose trees are not of one size",
    on=CAPTURED_BACKEND,
)
def widest_tape(seams: Seams) -> Seams:
    """The coins of every request are placed by the largest number of nodes in the batch."""
    return with_changed_batch(seams, lambda batch: replace(batch, nodes=batch.nodes.max().expand_as(batch.nodes)))


@fault(
    "batched-siblings-rounded-down",
    Stage.ACCEPTED,
    "family of catalogue BZ-040: a kernel's shape rounded the wrong way",
    "a sampling request whose tree has a node with three children",
    on=CAPTURED_BACKEND,
)
def siblings_rounded_down(seams: Seams) -> Seams:
    """The siblings that a captured call tries are rounded down to a power of two: the last ones are never tried."""

    def wrong(batch: PaddedBatch) -> PaddedBatch:
        most = int((batch.children > 0).sum(2).max())
        num_kept = 1 << most.bit_length() - 1 if most else 1
        return replace(batch, children=batch.children[:, :, :num_kept])

    return with_changed_batch(seams, wrong)


@fault(
    "batched-proposals-of-request-before",
    Stage.ACCEPTED,
    "vLLM PR #41044: rows of draft probabilities packed without regard to the order of the batch",
    "two sampling requests in one step whose drafts have laws",
    on=CAPTURED_BACKEND,
)
def proposals_of_neighbour(seams: Seams) -> Seams:
    """Each request is verified against the draft's laws of the request before it in the batch."""
    return with_changed_batch(seams, lambda batch: replace(batch, proposal=batch.proposal.roll(1, 0)))


FAULTS = faults_in(globals())
