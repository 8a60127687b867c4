"""Faults of a hand-over between servers.

Something is left behind, comes at a wrong place, or is read twice.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from specverify.backends.engine import stops
from specverify.backends.engine.guided.guide import Guide
from specverify.backends.engine.handover.state import Columns, RequestState
from specverify.backends.engine.request import Request
from specverify.backends.faults.fault import (
    Plant,
    accepted_fault,
    attended_fault,
    drafted_fault,
    emitted_fault,
    in_place_of,
    lowered_fault,
    scored_fault,
)
from specverify.reference.trace import Step

PAGE = 4
"""Columns of a page of the faulty transfer."""


def _sent(change: Callable[[RequestState], RequestState]) -> Plant:
    """A function from seams to seams whose requests send their state as `change` makes it."""

    class Sending(Request):
        def carried_state(self) -> RequestState:
            return change(super().carried_state())

    Sending.__doc__ = change.__doc__
    return in_place_of("request")(Sending)


def _with_tensors(columns: Columns, keys: list[Tensor], values: list[Tensor]) -> Columns:
    return replace(columns, keys=tuple(keys), values=tuple(values))


@attended_fault(
    "handed-over-without-last-page",
    "vllm-project/vllm #46694: the block that is filled in part is not transferred",
    "a request that is handed over with columns in a page that is not full, and then steps",
)
@_sent
def last_page(state: RequestState) -> RequestState:
    """Full pages of the target travel; the columns of the page that is filled in part arrive as zeros."""
    columns = state.target
    full = state.target.length // PAGE * PAGE
    parts = []
    for kind in (columns.keys, columns.values):
        copies = [tensor.clone() for tensor in kind]
        for copy, first in zip(copies, columns.first, strict=True):
            copy[:, max(full - first, 0) :] = 0
        parts.append(copies)
    return replace(state, target=_with_tensors(columns, *parts))


@drafted_fault(
    "handed-over-hidden-state-late",
    "sgl-project/sglang #9976: the wrong hidden tensor is transferred to the decode worker",
    "a request with a head that is handed over and then drafts",
)
@_sent
def hidden_late(state: RequestState) -> RequestState:
    """Each hidden state arrives beside the token after its own: the last one is lost, the first one stands twice."""
    states = state.hidden
    return state if states is None else replace(state, hidden=torch.cat([states[:1], states[:-1]]))


@drafted_fault(
    "handed-over-draft-before-it-ran",
    "vllm-project/vllm #35158: the draft's KV is saved before the drafter ran",
    "a request with a draft model that is handed over after a step, and then drafts",
)
@_sent
def draft_early(state: RequestState) -> RequestState:
    """The columns of the draft model's cache are sent as they were allocated: zeros."""
    columns = state.draft
    if columns is None:
        return state
    empty = [[torch.zeros_like(tensor) for tensor in kind] for kind in (columns.keys, columns.values)]
    return replace(state, draft=_with_tensors(columns, *empty))


@attended_fault(
    "handed-over-window-from-column-zero",
    "family of vllm-project/vllm #46694: the receiver counts the columns of a layer from the first that was sent",
    "a model with windows in a sliding layout, and a request that is handed over behind its window",
)
@_sent
def window_early(state: RequestState) -> RequestState:
    """A layer that has dropped its first columns puts the others at the beginning of the request."""
    columns = state.target
    moved_columns = [
        [
            torch.cat([tensor, tensor.new_zeros(tensor.shape[0], columns.length - tensor.shape[1], tensor.shape[2])], 1)
            for tensor in kind
        ]
        for kind in (columns.keys, columns.values)
    ]
    return replace(state, target=replace(_with_tensors(columns, *moved_columns), first=(0,) * len(columns.first)))


@scored_fault(
    "grammar-read-twice-at-hand-over",
    "sgl-project/sglang #29110: the first token is pushed into the grammar a second time on the decode worker",
    "a request with a grammar that is handed over after a token, and goes on",
)
@in_place_of("request")
class ReadingTwice(Request):
    """The receiver's grammar reads the last token of the output twice, where that is legal."""

    def read_again(self, guide: Guide, output: list[int]) -> None:
        super().read_again(guide, output)
        if output and bool(guide.row()[output[-1]]) and guide.matcher.push(output[-1]):
            guide.matcher.keep()


@accepted_fault(
    "handed-over-without-coins",
    "family of vllm-project/vllm #47386: the random stream of a request starts anew after its transfer",
    "a sampling request that is handed over after a step, and takes another",
)
@in_place_of("request")
class CoinsAnew(Request):
    """The receiver begins with the coins of the first step again."""

    spent = 0

    def carry_on(self, state: RequestState, steps: list[Step]) -> None:
        super().carry_on(state, steps)
        self.spent = len(state.lengths)

    @property
    def coined_steps(self) -> int:
        return int(super().coined_steps) - self.spent


@lowered_fault(
    "handed-over-position-of-prompt",
    "family of sgl-project/sglang #13590: the decode worker counts positions from the end of the prompt",
    "a request that is handed over after a step, and takes another",
)
@in_place_of("request")
class Early(Request):
    """The root that follows stands at the position of the prompt's last token."""

    def carry_on(self, state: RequestState, steps: list[Step]) -> None:
        super().carry_on(state, steps)
        self.position = len(self.case.prompt) - 1


@emitted_fault(
    "handed-over-stops-begin-anew",
    "family of vllm-project/vllm #48245: what the scheduler has counted of a request stays at the prefill worker",
    "a request that is handed over after a step, and ends by its length, by min_tokens or by a stop string",
)
@in_place_of("request")
class Anew(Request):
    """The receiver counts output tokens, and the text in which a stop string may begin, from the hand-over on."""

    def carry_on(self, state: RequestState, steps: list[Step]) -> None:
        super().carry_on(state, steps)
        self._written = stops.OutputTail()
