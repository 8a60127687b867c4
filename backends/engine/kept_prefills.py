"""Prompts that variants of a case share: prefilled once, and copied into each later run.

A variant such as another order of a tree's rows has the prompt of the case and asks nothing of its prefill. Copies have
the bits of the columns that they were made of. A run uses these columns only where it was asked to
(`specverify.backends.base.SharesPrefills`); every other run prefills for itself.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from specverify.backends.engine.handover.state import Columns, committed_columns_of, fill
from specverify.backends.engine.kv.choices import RowChoice, choices_beside
from specverify.backends.engine.kv.recurrent import states_of
from specverify.backends.engine.kv.target_calls import calls_over
from specverify.backends.engine.request import Request
from specverify.backends.engine.seams import Seams
from specverify.reference.case import Case
from specverify.reference.layout import KvLayout

KEPT = 3
"""Most prompts whose columns are kept; those used longest ago go first."""


@dataclass(frozen=True)
class _Prefill:
    """A prompt after its prefill: its tokens, columns, hidden states if the draft reads them, choices, and forwards."""

    tokens: tuple[int, ...]
    columns: Columns
    hidden: Tensor | None
    choices: dict[int, RowChoice]
    calls: Counter[str]


def _prefill_layout(layout: KvLayout) -> KvLayout:
    """`layout` without what is no matter of a prefill: padding of trees, what fills cells before steps, ways to commit.

    Copied columns are committed in the way of the run that takes them.
    """
    return replace(layout, padded_nodes=0, poison="", commit="path")


class KeptPrefills:
    """Prefills by model, dtype, layout, and the states that the draft reads.

    Args:
        seams: The functions of which the engine was composed when they ran; others' prefills are not asked.
    """

    def __init__(self, seams: Seams) -> None:
        self.seams = seams
        self._kept: OrderedDict[tuple[Any, ...], _Prefill] = OrderedDict()

    def prefill(self, request: Request, extends: bool) -> None:
        """Prefill `request`, with the columns of a kept prompt where it is the same.

        Args:
            request: A request whose cache is empty.
            extends: Whether a kept prompt may also be the beginning of its own, whose other tokens then run behind it.
        """
        if not _can_share(request):
            request.prefill()
            return
        tokens, group = tuple(request.tokens[:-1]), _group(request.case)
        begun = self._known_beginning(group, tokens, extends)
        if begun is not None:
            _begin(request, begun)
        request.prefill()
        if begun is None:
            self._keep(group, tokens, request)

    def _known_beginning(self, group: tuple[Any, ...], tokens: tuple[int, ...], extends: bool) -> _Prefill | None:
        """The longest kept prompt with which `tokens` begin, or which they are."""
        fitting = [
            key
            for key, prefill in self._kept.items()
            if key[0] == group
            and (prefill.tokens == tokens or (extends and tokens[: len(prefill.tokens)] == prefill.tokens))
        ]
        if not fitting:
            return None
        longest = max(fitting, key=lambda key: len(key[1]))
        self._kept.move_to_end(longest)
        return self._kept[longest]

    def _keep(self, group: tuple[Any, ...], tokens: tuple[int, ...], request: Request) -> None:
        cache = request.lease.target
        columns = committed_columns_of(cache, len(tokens))
        if any(columns.first):  # a layer has let columns go, which a copy could not hold
            return
        hidden = request.known_states
        calls = Counter(calls_over(cache))
        self._kept[group, tokens] = _Prefill(tokens, columns, hidden, dict(choices_beside(cache).rows), calls)
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)


def _can_share(request: Request) -> bool:
    """Whether the prefill of `request` leaves columns in the numbers of the working dtype, and states of their own.

    States in a slot, and those that a prefix cache keeps at the ends of pages, are not copied.
    """
    cache, case = request.lease.target, request.case
    states = states_of(cache)
    plain = request.axes is None and request.adapter is None and cache.length == 0 and cache.codec is None
    has_states_apart = states is None or (states.slot is None and not states.border)
    return plain and has_states_apart and request.can_share_columns(case) and len(case.prompt) > 1


def _group(case: Case) -> tuple[Any, ...]:
    return case.model, case.dtype, _prefill_layout(case.layout), case.draft.reads


def _begin(request: Request, prefill: _Prefill) -> None:
    """Let `request` begin with the columns of `prefill`."""
    cache = request.lease.target
    fill(cache, prefill.columns)
    choices_beside(cache).rows = dict(prefill.choices)
    calls_over(cache).update(prefill.calls)
    if prefill.hidden is not None:
        request.begin_with_rows(prefill.hidden)
