"""Faults of a hand-over between servers.

Something is left behind, comes at a wrong place, or is read twice.
"""

from dataclasses import replace

import torch
from torch import Tensor

from backends.engine import stops
from backends.engine.guided.guide import Guide
from backends.engine.handover.seams import HandOverSeams
from backends.engine.handover.state import Carried, Columns
from backends.engine.request import Request
from backends.engine.seams import Seams
from backends.faults.fault import fault, faults_in
from reference.trace import Stage, Step

PAGE = 4
"""Columns of a page of the faulty transfer."""


def _handing(seams: Seams, **changed: object) -> Seams:
    return replace(seams, hand_over=replace(seams.hand_over, **changed))  # type: ignore[arg-type]


def _changed(columns: Columns, keys: list[Tensor], values: list[Tensor]) -> Columns:
    return replace(columns, keys=tuple(keys), values=tuple(values))


@fault(
    "handed-over-without-last-page",
    Stage.ATTENDED,
    "vllm-project/vllm #46694: the block that is filled in part is not transferred",
    "a request that is handed over with columns in a page that is not full, and then steps",
)
def last_page(seams: Seams) -> Seams:
    """Full pages of the target travel; the columns of the page that is filled in part arrive as zeros."""

    def leaves(carried: Carried) -> Carried:
        sent, full = carried.target, carried.target.length // PAGE * PAGE
        parts = []
        for kind in (sent.keys, sent.values):
            copies = [one.clone() for one in kind]
            for copy, first in zip(copies, sent.first, strict=True):
                copy[:, max(full - first, 0) :] = 0
            parts.append(copies)
        return replace(carried, target=_changed(sent, *parts))

    return _handing(seams, leaves=leaves)


@fault(
    "handed-over-hidden-state-late",
    Stage.DRAFTED,
    "sgl-project/sglang #9976: the wrong hidden tensor is transferred to the decode worker",
    "a request with a head that is handed over and then drafts",
)
def hidden_late(seams: Seams) -> Seams:
    """Each hidden state arrives beside the token after its own: the last one is lost, the first one stands twice."""

    def leaves(carried: Carried) -> Carried:
        states = carried.hidden
        return carried if states is None else replace(carried, hidden=torch.cat([states[:1], states[:-1]]))

    return _handing(seams, leaves=leaves)


@fault(
    "handed-over-draft-before-it-ran",
    Stage.DRAFTED,
    "vllm-project/vllm #35158: the draft's KV is saved before the drafter ran",
    "a request with a draft model that is handed over after a step, and then drafts",
)
def draft_early(seams: Seams) -> Seams:
    """The columns of the draft model's cache are sent as they were allocated: zeros."""

    def leaves(carried: Carried) -> Carried:
        sent = carried.draft
        if sent is None:
            return carried
        empty = [[torch.zeros_like(one) for one in kind] for kind in (sent.keys, sent.values)]
        return replace(carried, draft=_changed(sent, *empty))

    return _handing(seams, leaves=leaves)


@fault(
    "handed-over-window-from-column-zero",
    Stage.ATTENDED,
    "family of vllm-project/vllm #46694: the receiver counts the columns of a layer from the first that was sent",
    "a model with windows in a sliding layout, and a request that is handed over behind its window",
)
def window_early(seams: Seams) -> Seams:
    """A layer that has dropped its first columns puts the others at the beginning of the request."""

    def leaves(carried: Carried) -> Carried:
        sent = carried.target
        moved = [
            [torch.cat([one, one.new_zeros(one.shape[0], sent.length - one.shape[1], one.shape[2])], 1) for one in kind]
            for kind in (sent.keys, sent.values)
        ]
        return replace(carried, target=replace(_changed(sent, *moved), first=(0,) * len(sent.first)))

    return _handing(seams, leaves=leaves)


@fault(
    "grammar-read-twice-at-hand-over",
    Stage.SCORED,
    "sgl-project/sglang #29110: the first token is pushed into the grammar a second time on the decode worker",
    "a request with a grammar that is handed over after a token, and goes on",
)
def read_twice(seams: Seams) -> Seams:
    """The receiver's grammar reads the last token of the output twice, where that is legal."""

    def again(guide: Guide, output: list[int]) -> None:
        seams.hand_over.read_again(guide, output)
        if output and bool(guide.row()[output[-1]]) and guide.matcher.push(output[-1]):
            guide.matcher.keep()

    return _handing(seams, read_again=again)


def _arriving(seams: Seams, kind: type[Request]) -> Seams:
    return replace(seams, request=kind)


@fault(
    "handed-over-without-coins",
    Stage.ACCEPTED,
    "family of vllm-project/vllm #47386: the random stream of a request starts anew after its transfer",
    "a sampling request that is handed over after a step, and takes another",
)
def coins_again(seams: Seams) -> Seams:
    """The receiver begins with the coins of the first step again."""

    class Restarted(seams.request):  # type: ignore[name-defined,misc]
        spent = 0

        def carry_on(self, sent: Carried, steps: list[Step], over: HandOverSeams) -> None:
            super().carry_on(sent, steps, over)
            self.spent = len(sent.lengths)

        @property
        def coined(self) -> int:
            return int(super().coined) - self.spent

    return _arriving(seams, Restarted)


@fault(
    "handed-over-position-of-prompt",
    Stage.LOWERED,
    "family of sgl-project/sglang #13590: the decode worker counts positions from the end of the prompt",
    "a request that is handed over after a step, and takes another",
)
def position_early(seams: Seams) -> Seams:
    """The root that follows stands at the position of the prompt's last token."""

    class Early(seams.request):  # type: ignore[name-defined,misc]
        def carry_on(self, sent: Carried, steps: list[Step], over: HandOverSeams) -> None:
            super().carry_on(sent, steps, over)
            self.position = len(self.case.prompt) - 1

    return _arriving(seams, Early)


@fault(
    "handed-over-stops-begin-anew",
    Stage.EMITTED,
    "family of vllm-project/vllm #48245: what the scheduler has counted of a request stays at the prefill worker",
    "a request that is handed over after a step, and ends by its length, by min_tokens or by a stop string",
)
def stops_anew(seams: Seams) -> Seams:
    """The receiver counts output tokens, and the text in which a stop string may begin, from the hand-over on."""

    class Anew(seams.request):  # type: ignore[name-defined,misc]
        def carry_on(self, sent: Carried, steps: list[Step], over: HandOverSeams) -> None:
            super().carry_on(sent, steps, over)
            self._written = stops.Written()

    return _arriving(seams, Anew)


FAULTS = faults_in(globals())
