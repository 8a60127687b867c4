"""The drafting of all requests of a batch, whose trees are filled side by side.

Each request fills its tree level by level. The levels of all requests that run one model share a forward.
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
from specverify.backends.engine.sampling.step import StepSampling

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
                request.lower(request.draft.propose(*arguments), chance)
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
