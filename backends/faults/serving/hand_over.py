"""Faults of a hand-over between servers.

Something is left behind, comes at a wrong place, or is read twice.
"""

from dataclasses import replace

import torch
from torch import Tensor

from specverify.backends.engine import stops
from specverify.backends.engine.guided.guide import Guide
from specverify.backends.engine.handover.seams import HandOverSeams
from specverify.backends.engine.handover.state import Columns, RequestState
from specverify.backends.engine.request import Request
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import fault, faults_in
from specverify.reference.trace import Stage, Step

PAGE = 4
"""Columns of a page of the faulty transfer."""


def _with_hand_over(seams: Seams, **parts: object) -> Seams:
    return replace(seams, hand_over=replace(seams.hand_over, **parts))  # type: ignore[arg-type]


def _with_tensors(columns: Columns, keys: list[Tensor], values: list[Tensor]) -> Columns:
    return replace(columns, keys=tuple(keys), values=tuple(values))


@fault(
    "handed-over-without-last-page",
    Stage.ATTENDED,
    "vllm-project/vllm #46694: the block that is filled in part is not transferred",
    "a request that is handed over with columns in a page that is not full, and then steps",
)
def last_page(seams: Seams) -> Seams:
    """Full pages of the target travel; the columns of the page that is filled in part arrive as zeros."""

    def outgoing(state: RequestState) -> RequestState:
        columns = state.target
        full = state.target.length // PAGE * PAGE
        parts = []
        for kind in (columns.keys, columns.values):
            copies = [tensor.clone() for tensor in kind]
            for copy, first in zip(copies, columns.first, strict=True):
                copy[:, max(full - first, 0) :] = 0
            parts.append(copies)
        return replace(state, target=_with_tensors(columns, *parts))

    return _with_hand_over(seams, outgoing=outgoing)


@fault(
    "handed-over-hidden-state-late",
    Stage.DRAFTED,
    "sgl-project/sglang #9976: the wrong hidden tensor is transferred to the decode worker",
    "a request with a head that is handed over and then drafts",
)
def hidden_late(seams: Seams) -> Seams:
    """Each hidden state arrives beside the token after its own: the last one is lost, the first one stands twice."""

    def outgoing(state: RequestState) -> RequestState:
        states = state.hidden
        return state if states is None else replace(state, hidden=torch.cat([states[:1], states[:-1]]))

    return _with_hand_over(seams, outgoing=outgoing)


@fault(
    "handed-over-draft-before-it-ran",
    Stage.DRAFTED,
    "vllm-project/vllm #35158: the draft's KV is saved before the drafter ran",
    "a request with a draft model that is handed over after a step, and then drafts",
)
def draft_early(seams: Seams) -> Seams:
    """The columns of the draft model's cache are sent as they were allocated: zeros."""

    def outgoing(state: RequestState) -> RequestState:
        columns = state.draft
        if columns is None:
            return state
        empty = [[torch.zeros_like(tensor) for tensor in kind] for kind in (columns.keys, columns.values)]
        return replace(state, draft=_with_tensors(columns, *empty))

    return _with_hand_over(seams, outgoing=outgoing)


@fault(
    "handed-over-window-from-column-zero",
    Stage.ATTENDED,
    "family of vllm-project/vllm #46694: the receiver counts the columns of a layer from the first that was sent",
    "a model with windows in a sliding layout, and a request that is handed over behind its window",
)
def window_early(seams: Seams) -> Seams:
    """A layer that has dropped its first columns puts the others at the beginning of the request."""

    def outgoing(state: RequestState) -> RequestState:
        columns = state.target
        moved_columns = [
            [
                torch.cat(
                    [tensor, tensor.new_zeros(tensor.shape[0], columns.length - tensor.shape[1], tensor.shape[2])], 1
                )
                for tensor in kind
            ]
            for kind in (columns.keys, columns.values)
        ]
        return replace(state, target=replace(_with_tensors(columns, *moved_columns), first=(0,) * len(columns.first)))

    return _with_hand_over(seams, outgoing=outgoing)


@fault(
    "grammar-read-twice-at-hand-over",
    Stage.SCORED,
    "sgl-project/sglang #29110: the first token is pushed into the grammar a second time on the decode worker",
    "a request with a grammar that is handed over after a token, and goes on",
)
def read_twice(seams: Seams) -> Seams:
    """The receiver's grammar reads the last token of the output twice, where that is legal."""

    def read_last_again(guide: Guide, output: list[int]) -> None:
        seams.hand_over.read_again(guide, output)
        if output and bool(guide.row()[output[-1]]) and guide.matcher.push(output[-1]):
            guide.matcher.keep()

    return _with_hand_over(seams, read_again=read_last_again)


def _with_arriving_request(seams: Seams, kind: type[Request]) -> Seams:
    return replace(seams, request=kind)


@fault(
    "handed-over-without-coins",
    Stage.ACCEPTED,
    "family of vllm-project/vllm #47386: the random stream of a request starts anew after its transfer",
    "a sampling request that is handed over after a step, and takes another",
)
def coins_again(seams: Seams) -> Seams:
    """The receiver begins with the coins of the first step again."""

    class CoinsAnew(seams.request):  # type: ignore[name-defined,misc]
        spent = 0

        def carry_on(self, state: RequestState, steps: list[Step], over: HandOverSeams) -> None:
            super().carry_on(state, steps, over)
            self.spent = len(state.lengths)

        @property
        def coined_steps(self) -> int:
            return int(super().coined_steps) - self.spent

    return _with_arriving_request(seams, CoinsAnew)


@fault(
    "handed-over-position-of-prompt",
    Stage.LOWERED,
    "family of sgl-project/sglang #13590: the decode worker counts positions from the end of the prompt",
    "a request that is handed over after a step, and takes another",
)
def position_early(seams: Seams) -> Seams:
    """The root that follows stands at the position of the prompt's last token."""

    class Early(seams.request):  # type: ignore[name-defined,misc]
        def carry_on(self, state: RequestState, steps: list[Step], over: HandOverSeams) -> None:
            super().carry_on(state, steps, over)
            self.position = len(self.case.prompt) - 1

    return _with_arriving_request(seams, Early)


@fault(
    "handed-over-stops-begin-anew",
    Stage.EMITTED,
    "family of vllm-project/vllm #48245: what the scheduler has counted of a request stays at the prefill worker",
    "a request that is handed over after a step, and ends by its length, by min_tokens or by a stop string",
)
def stops_anew(seams: Seams) -> Seams:
    """The receiver counts output tokens, and the text in which a stop string may begin, from the hand-over on."""

    class Anew(seams.request):  # type: ignore[name-defined,misc]
        def carry_on(self, state: RequestState, steps: list[Step], over: HandOverSeams) -> None:
            super().carry_on(state, steps, over)
            self._written = stops.OutputTail()

    return _with_arriving_request(seams, Anew)


FAULTS = faults_in(globals())
