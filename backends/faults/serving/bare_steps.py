"""Faults of drafts behind a step in which they were not asked, and of what they read there."""

from dataclasses import replace

import torch
from torch import Tensor

from backends.engine.draft.base import Proposal
from backends.engine.sampling.step import StepSampling
from backends.engine.seams import Seams
from backends.engine.step.state import Verification
from backends.faults.fault import fault, faults_in
from reference.trace import Committed, Stage
from reference.tree import Tree


@fault(
    "draft-skips-tokens-of-bare-steps",
    Stage.DRAFTED,
    "vllm-project/vllm-metal PR #716; vllm PR #53426: a step of K=0 leaves the draft KV behind",
    "a draft model that is asked behind a step without it",
)
def tokens_skipped(seams: Seams) -> Seams:
    """The tokens that a step without the draft has committed are never fed to the draft's model.

    The draft goes on where it was: its next token stands behind the last one that it was fed.
    """

    class Behind(seams.request):  # type: ignore[misc,name-defined]
        missed: tuple[int, ...] = ()

        def prefill(self) -> None:
            self.missed = ()  # a restored request's draft is fed everything again
            super().prefill()

        def commit(self, verdict: Verification, kept: list[int]) -> Committed:
            if verdict.block.bare and self.case.draft.model is not None and self.case.draft.reads is None:
                begin = len(verdict.shown.context)
                self.missed += tuple(range(begin, begin + len(kept)))
            committed: Committed = super().commit(verdict, kept)
            return committed

        def asked(
            self,
        ) -> tuple[StepSampling | None, tuple[list[int], StepSampling | None, Tensor | None]]:
            chance, (tokens, sampled, hidden) = super().asked()
            fed = [token for place, token in enumerate(tokens) if place not in self.missed]
            return chance, (fed, sampled, hidden)

    return replace(seams, request=Behind)


@fault(
    "states-of-bare-steps-zero",
    Stage.DRAFTED,
    "family of vllm-project/vllm PR #34751: where drafting is skipped, the draft's buffers are filled with zeros",
    "a draft that reads hidden states, and is asked behind a step without it",
)
def states_zero(seams: Seams) -> Seams:
    """A step without the draft leaves zeros where the target's hidden states belong, which the draft reads later.

    The states are taken off a forward only where some request of it drafts.
    """

    class Unread(seams.request):  # type: ignore[misc,name-defined]
        skipped = False

        def propose(self) -> None:
            self.skipped = False
            super().propose()

        def propose_root(self) -> None:
            self.skipped = True
            super().propose_root()

        def accepted_states(self, verified: Tensor, tree: Tree, kept: list[int]) -> Tensor:
            states: Tensor = super().accepted_states(verified, tree, kept)
            return torch.zeros_like(states) if self.skipped else states

    return replace(seams, request=Unread)


@fault(
    "proposal-of-preempted-step-kept",
    Stage.DRAFTED,
    "vllm-project/vllm PR #31955, PR #30796: spec_token_ids of a preempted request are sent when it runs again",
    "a request that is preempted, takes a step without its draft, and then one with it",
)
def proposal_kept(seams: Seams) -> Seams:
    """The tree that was drafted before a preemption is verified in the next drafted step, whatever came in between.

    The old ids hang from the new root; they are the right ones only where no token came in between.
    """

    class Keeping(seams.request):  # type: ignore[misc,name-defined]
        old: Proposal | None = None

        def abandon(self) -> None:
            self.old = None if self.block is None else self.block.proposal
            super().abandon()

        def propose(self) -> None:
            super().propose()
            old, block = self.old, self.block
            self.old = None
            assert block is not None
            if old is None or old.tree.parent != block.proposal.tree.parent:
                return
            nodes = block.nodes
            self.lower(replace(old, tree=old.tree.rooted(block.proposal.tree.token[0])), block.chance)
            self.block.nodes = nodes

    return replace(seams, request=Keeping)


@fault(
    "hidden-state-of-launch-before",
    Stage.DRAFTED,
    "family of sgl-project/sglang PR #35748: a row of the relay still holds what an earlier forward left",
    "a draft that reads hidden states, and two launches of a request before the first is resolved",
)
def state_of_launch_before(seams: Seams) -> Seams:
    """A step that is launched on top of another leaves the other's last hidden state for the next draft.

    The row of the relay is written before the launch has its own state.
    """

    class Relayed(seams.request):  # type: ignore[misc,name-defined]
        ahead = False
        before: Tensor | None = None

        def propose(self) -> None:
            self.ahead = len(self.tokens) > len(self.resolved)
            super().propose()

        def accepted_states(self, verified: Tensor, tree: Tree, kept: list[int]) -> Tensor:
            states: Tensor = super().accepted_states(verified, tree, kept)
            stale, self.before = self.before, states[-1:]
            return torch.cat([states[:-1], stale]) if self.ahead and stale is not None else states

    return replace(seams, request=Relayed)


FAULTS = faults_in(globals())
