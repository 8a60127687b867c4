"""Faults of the hidden states that a draft's head reads, and of their tokens."""

import torch
from torch import Tensor

from specverify.backends.engine.draft.head import HeadDraft
from specverify.backends.engine.model.hidden import HiddenTap
from specverify.backends.engine.request import Request
from specverify.backends.faults.drafting.model_drafts import in_place_of_draft
from specverify.backends.faults.fault import drafted_fault, faults_in, in_place_of
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.tree import Tree


@drafted_fault(
    "head-reads-state-one-early",
    "family of catalogue BZ-063: the draft's inputs are shifted by one against the target's states",
    "a head, and a prompt of three tokens",
)
@in_place_of_draft
class Early(HeadDraft):
    """Each row of a head holds the state of the position before its own.

    The first row keeps its own state, since there is none before.
    """

    def row_states(self, hidden: Tensor, first: int, last: int) -> Tensor:
        return hidden[[max(row - 1, 0) for row in range(first, last)]]


@drafted_fault(
    "head-layers-one-off",
    "vllm-project/vllm PR #43671, sgl-project/sglang PR #25454; catalogue BZ-031: auxiliary states one layer off",
    "a head that reads the residual stream",
)
@in_place_of("tap")
class Higher(HiddenTap):
    """The layers of a head's states are counted by their outputs where its weights count them by their inputs."""

    def places(self, reads: HiddenStates, layers: int) -> list[int | str]:
        return [min(place + 1, layers - 1) if isinstance(place, int) else place for place in _right(reads)]


def _right(reads: HiddenStates) -> list[int | str]:
    """The places that `reads` names."""
    return list(reads.layers) or ["normed"]


@drafted_fault(
    "head-reads-before-last-norm",
    "family of catalogue BZ-031: the state is taken before the last norm instead of behind it",
    "a head that reads the output of the last norm",
)
@in_place_of("tap")
class TapBeforeNorm(HiddenTap):
    """A head that expects the normed last state is given the residual stream before the norm."""

    def places(self, reads: HiddenStates, layers: int) -> list[int | str]:
        return [layers - 1 if place == "normed" else place for place in _right(reads)]


@drafted_fault(
    "rotated-states-for-plain-head",
    "vllm-project/vllm-ascend PR #6914; catalogue BZ-052: rotated target features fed to an un-rotated draft fc",
    "a head",
)
@in_place_of_draft
class RotatedStates(HeadDraft):
    """The target's states are handed over in a rotated basis, which the weights of the head do not know."""

    def row_states(self, hidden: Tensor, first: int, last: int) -> Tensor:
        return super().row_states(hidden, first, last).flip(-1)


@drafted_fault(
    "root-fused-without-its-state",
    "arXiv 2508.08192, section 3.4: after prefill the first new token is fused with its own hidden state",
    "a head, and a first step",
)
@in_place_of_draft
class Empty(HeadDraft):
    """The first root after a prefill stands beside an empty state in place of that of the token before it.

    The buffer of states is written by verifications alone.
    """

    fresh = False

    def catch_up(self, tokens: list[int], hidden: Tensor) -> Tensor:
        # Only a prefill begins without a row.
        self.fresh = not self.cache.length
        return super().catch_up(tokens, hidden)

    def row_states(self, hidden: Tensor, first: int, last: int) -> Tensor:
        states = super().row_states(hidden, first, last)
        # The last chunk of a prefill ends with the last state there is.
        if self.fresh and last == len(hidden):
            states = torch.cat([states[:-1], torch.zeros_like(states[-1:])])
        return states


@drafted_fault(
    "chunk-ends-beside-its-own-token",
    "sgl-project/sglang PR #26329: the last row of a prefill chunk needs the first token of the next chunk",
    "a head, and a prefill in chunks",
)
@in_place_of_draft
class ChunkSeam(HeadDraft):
    """The last row of a prefill chunk holds the chunk's own last token, since the next chunk is not known yet."""

    def row_tokens(self, tokens: list[int], first: int, last: int) -> list[int]:
        right = super().row_tokens(tokens, first, last)
        return right if last == len(tokens) - 1 else [*right[:-1], tokens[last - 1]]


@drafted_fault(
    "accepted-state-of-wrong-sibling",
    "arXiv 2406.16858, and SafeAILab/EAGLE, update_inference_inputs: states are gathered by the accepted path",
    "a draft that reads hidden states, an accepted node with a sibling, and a step after it",
)
@in_place_of("request")
class SiblingStates(Request):
    """The state kept for an accepted node is that of its first sibling, which was rejected."""

    def accepted_states(self, verified: Tensor, tree: Tree, kept_nodes: list[int]) -> Tensor:
        siblings = [[sibling for sibling in tree.children[tree.parent[node]] if sibling != node] for node in kept_nodes]
        wrong_nodes = [
            node_siblings[0] if node and node_siblings else node
            for node, node_siblings in zip(kept_nodes, siblings, strict=True)
        ]
        return super().accepted_states(verified, tree, wrong_nodes)


@drafted_fault(
    "states-truncated-not-gathered",
    "family of catalogue BZ-112: what a verification leaves is cut to the accepted length, not gathered by path",
    "a draft that reads hidden states, an accepted path that is no prefix of the rows, and a step after it",
)
@in_place_of("request")
class TruncatedStates(Request):
    """The states kept after a verification are those of its first rows, as many as were accepted."""

    def accepted_states(self, verified: Tensor, tree: Tree, kept_nodes: list[int]) -> Tensor:
        return super().accepted_states(verified, tree, list(range(len(kept_nodes))))


LARGEST = 2.0
"""The largest state that the fault of overflow lets through; it stands for the 65504 of float16.

States of built-in targets are of the size of 1, and those of large models reach what float16 holds.
"""


@drafted_fault(
    "head-input-overflows",
    "SafeAILab/EAGLE PR #69; catalogue BZ-009: hidden states overflow float16, and the draft reads infinities",
    "a head, and a hidden state with a large value",
)
@in_place_of_draft
class Narrow(HeadDraft):
    """A value of a hidden state beyond what the head's narrow type holds becomes infinite on its way to the head."""

    def row_states(self, hidden: Tensor, first: int, last: int) -> Tensor:
        states = super().row_states(hidden, first, last)
        return torch.where(states.abs() > LARGEST, torch.copysign(torch.full_like(states, torch.inf), states), states)


FAULTS = faults_in(globals())
