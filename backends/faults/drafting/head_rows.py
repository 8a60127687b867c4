"""Faults of the rows that a draft's head keeps, and of the rows of its tree."""

import torch
from torch import Tensor

from specverify.backends.engine.draft.base import Proposal
from specverify.backends.engine.draft.head import HeadDraft
from specverify.backends.engine.reach import Reach
from specverify.backends.engine.sampling.step import StepSampling
from specverify.backends.faults.drafting.model_drafts import in_place_of_draft
from specverify.backends.faults.fault import drafted_fault, faults_in


@drafted_fault(
    "own-states-kept-for-accepted-nodes",
    "vllm-project/vllm issue #14649: the head's own states stay in its KV where the target's are known",
    "a head with an accepted node that has a child",
)
@in_place_of_draft
class KeepsOwnStates(HeadDraft):
    """Rows of accepted nodes keep the states that the head put out itself, and are not run again with the target's.

    As a draft model keeps the KV of accepted tokens, the head keeps its rows.
    """

    def rows_to_keep(self, kept_nodes: list[int]) -> list[int]:
        return [self.slots[node] - self.cache.length for node in self.shape.path(kept_nodes[-1]) if node in self.slots]


@drafted_fault(
    "rejected-head-row-kept",
    "mlc-ai/mlc-llm PR #2939; family of catalogue BZ-137: draft cache not popped for unaccepted tokens",
    "a head with a rejected node that has a child, and an accepted node",
)
@in_place_of_draft
class KeepsRejectedRow(HeadDraft):
    """The row of a rejected node stays in the head's cache, in the place of the first accepted token."""

    def rows_to_keep(self, kept_nodes: list[int]) -> list[int]:
        rejected_nodes = [node for node in sorted(self.slots) if node not in kept_nodes]
        # With the bare root accepted the next step would have no row to run.
        return [self.slots[rejected_nodes[0]] - self.cache.length] if rejected_nodes and len(kept_nodes) > 1 else []


@drafted_fault(
    "offsets-read-as-target-ids",
    "family of catalogue BZ-051: d2t holds offsets (target id = draft id + d2t), and is read as ids",
    "a head with a reduced vocabulary",
)
@in_place_of_draft
class Offsets(HeadDraft):
    """The table d2t of a head is read as target ids, although it holds their offsets from the draft ids."""

    def propose(self, tokens: list[int], chance: StepSampling | None = None, hidden: Tensor | None = None) -> Proposal:
        if self.head.d2t is not None:
            self.named_ids = self.head.d2t.cpu()
        return super().propose(tokens, chance, hidden)


@drafted_fault(
    "head-reads-another-nodes-output",
    "family of catalogue BZ-062: a row of the draft's tree continues another node's parent",
    "a head whose tree has two inner nodes with unlike parents at one depth",
)
@in_place_of_draft
class RolledStates(HeadDraft):
    """A node's row holds the output of another node's parent: the states of a level are in another order."""

    def node_states(self, level: list[int]) -> Tensor:
        return super().node_states(level).roll(1, 0)


@drafted_fault(
    "head-positions-frozen",
    "family of catalogue BZ-059: positions of later draft levels are those of the first",
    "a head whose tree has inner nodes at two depths",
)
@in_place_of_draft
class Frozen(HeadDraft):
    """Every row of a head's tree stands at the position of the first level."""

    def branch(self, level: list[int], root: int, reaches: list[Reach]) -> tuple[Tensor, list[Tensor]]:
        positions, masks = super().branch(level, root, reaches)
        return torch.full_like(positions, root + 1), masks


FAULTS = faults_in(globals())
