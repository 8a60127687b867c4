"""Decisions for all requests of a batch at once: drafting side by side, and acceptance in one call.

Each request fills its tree level by level; the levels of all requests that run one model share a forward. Acceptance
comes after the verify forward, and before each request settles its step.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import Tensor

from specverify.backends.engine.captured.lanes import LaneModel, LaneRows
from specverify.backends.engine.captured.runner import LevelRunner
from specverify.backends.engine.draft.base import Proposal
from specverify.backends.engine.draft.filling import CachedTreeFilling, Level, Levels
from specverify.backends.engine.request import Request
from specverify.backends.engine.sampling.batched import BatchedVerify, kind_of
from specverify.backends.engine.sampling.question import Question
from specverify.backends.engine.sampling.step import StepSampling
from specverify.reference.trace import Stage

Results = list[tuple[Tensor, list[Tensor]]]
"""For each request the logits of the rows of all requests, and the attention outputs of its own rows by layer."""


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
    if isinstance(sampling.batched, BatchedVerify):
        batch[0].target.fallbacks.update(sampling.batched.take_fallbacks())
    return results


def _pose_question(request: Request, flat: Tensor) -> tuple[StepSampling, Question] | None:
    """The question of one request after the forward of its batch, with logits `flat`; None for a greedy request."""
    block = request.block
    assert block is not None
    if block.chance is None or not block.chance.samples:
        return None
    request.stage = Stage.SCORED
    logits = request.seams.score(flat, block.index)
    request.stage = Stage.ACCEPTED
    return block.chance, block.chance.pose(block.proposal.tree, logits, block.proposal.proposal)


Naming = Callable[[Request], AbstractContextManager[None]]
"""Gives an exception the stage of the request at which it was raised."""


@dataclass
class DraftingRequest:
    """A request whose tree is being filled.

    Attributes:
        request: The request.
        draft: Its draft.
        chance: Its sampling in this step.
        levels: The filling.
        level: The level that waits for its scores; None once the tree is complete.
    """

    request: Request
    draft: CachedTreeFilling
    chance: StepSampling | None
    levels: Levels
    level: Level | None = None

    def fill_level(self, scores: Tensor | None = None) -> None:
        """Fill the tree up to its next level with `scores`; a complete tree is lowered."""
        try:
            self.level = next(self.levels) if scores is None else self.levels.send(scores)
        except StopIteration as end:
            proposal: Proposal = end.value
            self.level = None
            self.request.lower(proposal, self.chance)


def draft_together(batch: list[Request], runner: LevelRunner, naming: Naming) -> None:
    """Propose a tree for each request of `batch`; drafts without levels propose by themselves.

    The first forward of each draft, over the tokens of the step before, stays the request's own.
    """
    drafting: dict[int, DraftingRequest] = {}
    for number, request in enumerate(batch, 1):
        with naming(request):
            chance, arguments = request.begin_drafting()
            if isinstance(request.draft, CachedTreeFilling):
                drafting_request = DraftingRequest(request, request.draft, chance, request.draft.levels(*arguments))
                drafting_request.fill_level()
                drafting[number] = drafting_request
            else:
                request.lower(request.ask_draft(*arguments), chance)
    waiting = _with_waiting_level(drafting)
    while waiting:
        for scores in _level_scores_by_model(waiting, runner, naming):
            for number, request_scores in scores.items():
                with naming(waiting[number].request):
                    waiting[number].fill_level(request_scores)
        waiting = _with_waiting_level(drafting)


def _with_waiting_level(drafting: dict[int, DraftingRequest]) -> dict[int, DraftingRequest]:
    """The requests whose trees have a level to be scored."""
    return {number: request for number, request in drafting.items() if request.level is not None}


def _level_scores_by_model(
    waiting: dict[int, DraftingRequest], runner: LevelRunner, naming: Naming
) -> Iterator[dict[int, Tensor]]:
    """The scores of each waiting level by the number of its request, model by model."""
    groups: dict[int, tuple[LaneModel, dict[int, LaneRows]]] = {}
    for number, drafting_request in waiting.items():
        with naming(drafting_request.request):
            assert drafting_request.level is not None
            model = drafting_request.draft.lane_model
            groups.setdefault(id(model), (model, {}))[1][number] = drafting_request.draft.lane(drafting_request.level)
    for model, lanes in groups.values():
        first = waiting[next(iter(lanes))].request
        with naming(first):
            outputs = runner.run(model, lanes, first.seams.draft_attend, first.seams.kv.single)
        yield {number: _level_scores(waiting[number], outputs[number], naming) for number in lanes}


def _level_scores(drafting_request: DraftingRequest, outputs: Tensor, naming: Naming) -> Tensor:
    """The scores of the level for which `drafting_request` waits, from the outputs of its rows."""
    with naming(drafting_request.request):
        assert drafting_request.level is not None
        return drafting_request.draft.level_scores(drafting_request.level, outputs)
