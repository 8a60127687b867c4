"""The acceptance of all sampling requests of a batch in one call.

It comes after the verify forward, and before each request settles its step.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import Tensor

from specverify.backends.engine.request import Request
from specverify.backends.engine.sampling.batched import kind_of
from specverify.backends.engine.sampling.question import Question
from specverify.backends.engine.sampling.step import StepSampling
from specverify.reference.trace import Stage

Results = list[tuple[Tensor, list[Tensor]]]
"""For each request the logits of its rows, and the attention outputs of these rows by layer."""


def decide_together(
    batch: list[Request], results: Results, naming: Callable[[Request], AbstractContextManager[None]]
) -> Results:
    """Decide for all requests of `batch` that ask questions of one kind at once; return `results` unchanged.

    Each decision is left with its request, whose `accept` then finds it. Without the seam `batched` nothing is decided.
    """
    sampling = batch[0].seams.sampling
    if sampling.batched is None:
        return results
    kinds: dict[object, list[tuple[StepSampling, Question]]] = {}
    for request, (flat, _) in zip(batch, results, strict=True):
        with naming(request):
            question = _pose_question(request, flat)
        kind = None if question is None else kind_of(question[1])
        if question is not None and kind is not None:
            kinds.setdefault(kind, []).append(question)
    for posed_questions in kinds.values():
        with naming(batch[0]):
            answers = sampling.batched([question for _, question in posed_questions], sampling)
        for (chance, _), answer in zip(posed_questions, answers, strict=True):
            chance.answer = answer
    return results


def _pose_question(request: Request, flat: Tensor) -> tuple[StepSampling, Question] | None:
    """The question of one request after its forward, whose logits are `flat`; None for a greedy request."""
    block = request.block
    assert block is not None
    if block.chance is None or not block.chance.samples:
        return None
    request.stage = Stage.SCORED
    logits = request.seams.score(flat, block.tensors.retrieve_index)
    request.stage = Stage.ACCEPTED
    return block.chance, block.chance.pose(block.proposal.tree, logits, block.proposal.proposal)
