"""Faults of engines that switch speculation off for some requests of a batch, and on again."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specverify.backends.engine.draft.base import Proposal
from specverify.backends.engine.draft.language_model import ModelDraft
from specverify.backends.engine.kv.recurrent import states_of
from specverify.backends.engine.request import Request
from specverify.backends.engine.seams import Seams
from specverify.backends.engine.step.state import Verification
from specverify.backends.faults.fault import committed_fault, drafted_fault, in_place_of, scored_fault
from specverify.reference.trace import Committed
from specverify.reference.tree import Tree


class UnwrittenDraft(ModelDraft):
    """A draft model whose cache holds unwritten rows at some places."""

    unwritten_places: tuple[int, ...] = ()

    def catch_up(self, tokens: list[int]) -> Tensor:
        for place in self.unwritten_places:
            if self.cache.length < place:
                super().catch_up(tokens[:place])
            if self.cache.length == place > 0:
                self.cache.open(1)
                for layer in range(self.cache.layers):
                    # What memory held that nothing wrote: zeros, of the sizes of another column.
                    keys, values = (columns[:, -1:] * 0.0 for columns in self.cache.committed_columns(layer)[1:])
                    self.cache.write(layer, keys, values)
                self.cache.commit([0])
        self.unwritten_places = ()
        return super().catch_up(tokens)


@drafted_fault(
    "rows-of-bare-steps-unwritten",
    "TensorRT-LLM pull request 16888: at a draft length of 0 positions are allocated and nothing writes them",
    "a draft model that is asked behind a step without it",
)
@in_place_of("request")
class UnwrittenRows(Request):
    """A step without the draft allocates its row in the draft's cache, and nothing ever writes it."""

    def commit(self, verdict: Verification, rows: list[int]) -> Committed:
        if type(self.draft) is ModelDraft:
            self.draft.__class__ = UnwrittenDraft
        draft: object = self.draft
        if verdict.block.bare and type(draft) is UnwrittenDraft and states_of(draft.cache) is None:
            begin = len(verdict.step.context)
            draft.unwritten_places += tuple(range(begin, begin + len(rows)))
        committed: Committed = super().commit(verdict, rows)
        return committed

    def prefill(self) -> None:
        draft: object = self.draft
        if type(draft) is UnwrittenDraft:
            draft.unwritten_places = ()  # a restored request's draft is fed everything again
        super().prefill()


@drafted_fault(
    "state-pool-of-bare-steps-stale",
    "TensorRT-LLM pull request 16888: hidden-state pools are refreshed only while the draft's forward runs",
    "a draft that reads hidden states, and is asked behind a step without it",
)
@in_place_of("request")
class StalePool(Request):
    """A step without the draft leaves the last hidden state of the step before in the pool that the draft reads."""

    last_state: Tensor | None = None
    is_bare = False

    def accept(self, flat: Tensor, heads: list[Tensor]) -> Verification:
        assert self.block is not None
        self.is_bare = self.block.bare
        verdict: Verification = super().accept(flat, heads)
        return verdict

    def accepted_states(self, verified: Tensor, tree: Tree, rows: list[int]) -> Tensor:
        states: Tensor = super().accepted_states(verified, tree, rows)
        if self.is_bare and self.last_state is not None:
            return self.last_state.expand_as(states)
        self.last_state = states[-1:]
        return states


@committed_fault(
    "old-draft-in-bare-step",
    "vllm-project/vllm issue 51510: at K=0 stale tokens of the step before are read from the full-width buffer",
    "a step without the draft behind one whose tree had nodes",
)
@in_place_of("request")
class PhantomDrafts(Request):
    """A step without the draft verifies the tokens that the step before had proposed."""

    proposed: Proposal | None = None

    def propose(self) -> None:
        super().propose()
        assert self.block is not None
        self.proposed = self.block.proposal

    def propose_root(self) -> None:
        super().propose_root()
        old, block = self.proposed, self.block
        assert block is not None
        if old is not None and len(old.tree) > 1:
            self.lower(Proposal(old.tree.with_root(block.proposal.tree.token[0])), block.chance, bare=True)


@scored_fault(
    "states-arranged-by-widest",
    "vllm-project/vllm pull request 7508: hidden states are reshaped as if every sequence had drafted tokens",
    "a batch of a request without its draft and later ones with drafts that read hidden states",
)
def arranged_by_widest(seams: Seams) -> Seams:
    """Hidden states of a batch are cut into equal parts, as if the requests without drafted tokens had some too."""
    counts_by_lane: list[int] = []

    class CuttingTap(seams.tap):  # type: ignore[misc,name-defined]
        def __init__(self, *descriptors: Any) -> None:
            super().__init__(*descriptors)
            self._counts = tuple(counts_by_lane)
            counts_by_lane.clear()

        @contextmanager
        def on(self, body: Any) -> Iterator[None]:
            with super().on(body):
                yield
            if len(set(self._counts)) > 1 and 1 in self._counts:
                for reads in tuple(self.states):
                    self.states[reads] = self._cut(self.states[reads])

        def _cut(self, states: Tensor) -> Tensor:
            rows = torch.cat([states[lane, :count] for lane, count in enumerate(self._counts)])
            lanes, width = states.shape[:2]
            places = torch.arange(lanes * width, device=rows.device).clamp(max=len(rows) - 1)
            return rows[places].view(lanes, width, -1)

    def gather(batch: list[Request]) -> Any:
        rows_by_lane = seams.gather(batch)
        counts_by_lane.clear()
        if any(request.case.draft.reads is not None for request in batch):
            counts_by_lane.extend(len(rows.tokens) for rows in rows_by_lane)
        return rows_by_lane

    return replace(seams, tap=CuttingTap, gather=gather)
