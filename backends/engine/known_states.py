"""The hidden states of its committed tokens that a request knows, for a draft that reads them.

Prefills and verify forwards give them. A request that begins with known pages has them from the pages, or lacks those
before the end of the pages; a fork has those of its source.
"""

from dataclasses import replace

import torch
from torch import Tensor

from specverify.backends.engine.draft.base import Draft, OwnRows
from specverify.backends.engine.kv.arena import CacheLease
from specverify.backends.engine.kv.layouts import CACHES
from specverify.backends.engine.kv.recurrent import put_states_beside
from specverify.backends.engine.model.axes import Axes
from specverify.backends.engine.model.causal_lm import CausalLm
from specverify.backends.engine.model.low_rank import LowRank
from specverify.backends.engine.step_seams import StepSeams
from specverify.reference.case import Case
from specverify.reference.layout import PLAIN, KvLayout


class KnownStates:
    """The part of a request that knows hidden states.

    Attributes:
        states_from: The first column whose hidden state is known; 0 for all.
    """

    case: Case
    target: CausalLm
    seams: StepSeams
    tokens: list[int]
    lease: CacheLease
    draft: Draft
    adapter: LowRank | None
    axes: Axes | None
    states_from: int = 0
    _hidden: list[Tensor]

    @property
    def hidden_width(self) -> int:
        """The width of the hidden states that its draft reads; 0 if it reads none."""
        reads = self.case.draft.reads
        return 0 if reads is None else reads.parts * int(self.target.model.config.hidden_size)

    def begin_with_states(self, source: "KnownStates") -> None:
        """Take over the hidden states of `source`, whose columns this request has forked, and the rows of its head."""
        self._hidden = [torch.cat(source._hidden)] if source._hidden else []
        self.states_from = source.states_from
        same_head = source.lease.owner is self.lease.owner
        if same_head and isinstance(self.draft, OwnRows) and isinstance(source.draft, OwnRows):
            self.draft.follow(source.draft)

    @property
    def known_states(self) -> Tensor | None:
        """A copy of the hidden states that it knows, [rows, width]; None if its draft reads none."""
        return torch.cat(self._hidden) if self._hidden else None

    def begin_with_rows(self, states: Tensor) -> None:
        """Begin with the hidden states [rows, width] of the first columns, which it did not compute."""
        self._hidden = [states]
        self.keep_states(0, states)

    def forget_states(self) -> None:
        """Forget the hidden states of all tokens, as a request does that loses its columns."""
        self._hidden = []
        self.states_from = 0

    def states_of_pages(self, end: int) -> Tensor:
        """The hidden states [end, width] of the columns of known pages with which the request begins.

        NaN stands for states that pages do not carry: no row of the head may need them.
        """
        if self.lease.states is not None:
            return self.lease.states.read(end)
        self.states_from = end
        return torch.full((end, self.hidden_width), torch.nan, dtype=self.target.dtype, device=self.target.device)

    def keep_states(self, begin: int, states: Tensor) -> None:
        """Write the states [rows, width] of the committed columns from `begin` on to the pages that carry them."""
        if self.lease.states is not None:
            self.lease.states.write(begin, states)

    def recompute_states(self) -> None:
        """Run the target on the tokens whose hidden states no page carried, in a cache that is thrown away."""
        count, reads = self.states_from, self.case.draft.reads
        if not count or reads is None:
            return
        room = replace(self.target.room(count, count), codec=self.lease.target.codec)
        cache = CACHES[PLAIN](self.seams.kv, room, KvLayout())
        if self.target.recurrent:
            put_states_beside(cache, self.seams.kv.states(0))
        attend = self.seams.prefill_attend or self.seams.attend
        tokens = tuple(self.tokens[:count])
        first_states = self.target.prefill(
            tokens, cache, attend, 0, self.seams.kv.single, reads, self.seams.tap, self.adapter, None, self.axes
        )
        self._hidden = [*first_states, torch.cat(self._hidden)[count:]]
        self.states_from = 0
