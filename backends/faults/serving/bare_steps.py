"""Faults of drafts behind a step in which they were not asked, and of what they read there."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specverify.backends.engine.draft.base import Proposal
from specverify.backends.engine.request import Request
from specverify.backends.engine.sampling.step import StepSampling
from specverify.backends.engine.seams import Seams
from specverify.backends.engine.step.state import Verification
from specverify.backends.faults.fault import drafted_fault, in_place_of
from specverify.reference.trace import Committed
from specverify.reference.tree import Tree


def _with_changed_states(
    seams: Seams, choose: Callable[[Any, bool], bool], change: Callable[[Tensor, Tensor | None], Tensor]
) -> Seams:
    """`seams` whose requests change the hidden states of accepted rows in the steps that `choose` names.

    Args:
        seams: The seams.
        choose: Called when a step begins, with the request, and True where its draft is not asked.
        change: Makes the states from the right ones, and from the right ones of the step before if there was one.
    """

    class ChangingRequest(seams.request):  # type: ignore[misc,name-defined]
        is_changed = False
        states_before: Tensor | None = None

        def propose(self) -> None:
            self.is_changed = choose(self, False)
            super().propose()

        def propose_root(self) -> None:
            self.is_changed = choose(self, True)
            super().propose_root()

        def accepted_states(self, verified: Tensor, tree: Tree, rows: list[int]) -> Tensor:
            states: Tensor = super().accepted_states(verified, tree, rows)
            before = self.states_before
            self.states_before = states
            return change(states, before) if self.is_changed else states

    return replace(seams, request=ChangingRequest)


@drafted_fault(
    "draft-skips-tokens-of-bare-steps",
    "vllm-project/vllm-metal PR #716; vllm PR #53426: a step of K=0 leaves the draft KV behind",
    "a draft model that is asked behind a step without it",
)
@in_place_of("request")
class SkippingRequest(Request):
    """The tokens that a step without the draft has committed are never fed to the draft's model."""

    missed_places: tuple[int, ...] = ()

    def prefill(self) -> None:
        self.missed_places = ()  # a restored request's draft is fed everything again
        super().prefill()

    def commit(self, verdict: Verification, rows: list[int]) -> Committed:
        if verdict.block.bare and self.case.draft.model is not None and self.case.draft.reads is None:
            begin = len(verdict.step.context)
            self.missed_places += tuple(range(begin, begin + len(rows)))
        committed: Committed = super().commit(verdict, rows)
        return committed

    def begin_drafting(
        self,
    ) -> tuple[StepSampling | None, tuple[list[int], StepSampling | None, Tensor | None]]:
        chance, (tokens, draft_sampling, hidden) = super().begin_drafting()
        fed_tokens = [token for place, token in enumerate(tokens) if place not in self.missed_places]
        return chance, (fed_tokens, draft_sampling, hidden)


@drafted_fault(
    "states-of-bare-steps-zero",
    "family of vllm-project/vllm PR #34751: where drafting is skipped, the draft's buffers are filled with zeros",
    "a draft that reads hidden states, and is asked behind a step without it",
)
def states_zero(seams: Seams) -> Seams:
    """A step without the draft leaves zeros where the target's hidden states belong, which the draft reads later.

    The states are taken off a forward only where some request of it drafts.
    """

    def is_bare(request: Any, bare: bool) -> bool:
        return bare

    def zeros(states: Tensor, before: Tensor | None) -> Tensor:
        return torch.zeros_like(states)

    return _with_changed_states(seams, is_bare, zeros)


@drafted_fault(
    "proposal-of-preempted-step-kept",
    "vllm-project/vllm PR #31955, PR #30796: spec_token_ids of a preempted request are sent when it runs again",
    "a request that is preempted, takes a step without its draft, and then one with it",
)
@in_place_of("request")
class KeepingRequest(Request):
    """The tree that was drafted before a preemption is verified in the next drafted step, whatever came in between.

    The old ids hang from the new root; they are the right ones only where no token came in between.
    """

    old: Proposal | None = None

    def abandon(self) -> None:
        self.old = None if self.block is None else self.block.proposal
        super().abandon()

    def propose(self) -> None:
        super().propose()
        old = self.old
        block = self.block
        self.old = None
        assert block is not None
        if old is None or old.tree.parent != block.proposal.tree.parent:
            return
        nodes = block.nodes
        self.lower(replace(old, tree=old.tree.with_root(block.proposal.tree.token[0])), block.chance)
        assert self.block is not None
        self.block.nodes = nodes


@drafted_fault(
    "hidden-state-of-launch-before",
    "family of sgl-project/sglang PR #35748: a row of the relay still holds what an earlier forward left",
    "a draft that reads hidden states, and two launches of a request before the first is resolved",
)
def state_of_launch_before(seams: Seams) -> Seams:
    """A step that is launched on top of another leaves the other's last hidden state for the next draft.

    The row of the relay is written before the launch has its own state.
    """

    def is_ahead(request: Any, bare: bool) -> bool:
        # A step without its draft counts as the last one with it did.
        return bool(request.is_changed) if bare else len(request.tokens) > len(request.resolved_tokens)

    def with_last_state_before(states: Tensor, before: Tensor | None) -> Tensor:
        return states if before is None else torch.cat([states[:-1], before[-1:]])

    return _with_changed_states(seams, is_ahead, with_last_state_before)
