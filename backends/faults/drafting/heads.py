"""Faults of heads: the states and tokens that they read, their rows, Medusa heads and MTP modules."""

import torch
from torch import Tensor
from torch.nn import functional

from specverify.backends.engine.draft.base import HeadRows, Proposal
from specverify.backends.engine.draft.head import HeadDraft
from specverify.backends.engine.draft.medusa import MedusaDraft
from specverify.backends.engine.draft.mtp import MtpDraft
from specverify.backends.engine.model.hidden import HiddenTap
from specverify.backends.engine.reach import Reach
from specverify.backends.engine.request import Request
from specverify.backends.engine.sampling.step import StepSampling
from specverify.backends.faults.fault import drafted_fault, in_place_of, in_place_of_draft
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.medusa import HEADS_PREFIX
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
    "first-token-fused-without-its-state",
    "arXiv 2508.08192, section 3.4: the first token of a prompt is fused with its own hidden state",
    "a head whose first token has a row",
)
@in_place_of_draft
class FirstBesideNothing(HeadDraft):
    """The first token of a text has a row, and stands beside an empty state in place of its own."""

    def row_states(self, hidden: Tensor, first: int, last: int) -> Tensor:
        states = super().row_states(hidden, first, last)
        if self.words.fuses_first and first == 0:
            states = torch.cat([torch.zeros_like(states[:1]), states[1:]])
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


@drafted_fault(
    "own-states-kept-for-accepted-nodes",
    "vllm-project/vllm issue #14649: the head's own states stay in its KV where the target's are known",
    "a head with the alignment `accepted`, and an accepted node that has a child",
)
@in_place_of_draft
class KeepsOwnStates(HeadDraft):
    """Rows of accepted nodes keep the states that the head put out itself, though its alignment is to run them again.

    As a draft model keeps the KV of accepted tokens, the head keeps its rows. With the alignment `last` that is right.
    """

    def rows_to_keep(self, kept_nodes: list[int]) -> list[int]:
        return self.run_rows(kept_nodes[-1])


@drafted_fault(
    "last-token-beside-the-roots-state",
    "arXiv 2508.08192, section 3.4: the draft is aligned by the last output token and the hidden state of that token",
    "a head with the alignment `last`, and an accepted node that has a child",
)
@in_place_of_draft
class AlignedByRoot(HeadDraft):
    """Where rows of accepted nodes stay, the row behind them stands beside the state of the root that was verified.

    A verification leaves the state of its first row, whatever was accepted.
    """

    def row_states(self, hidden: Tensor, first: int, last: int) -> Tensor:
        states = super().row_states(hidden, first, last)
        row = first
        while row - 1 in self.own_rows:
            row -= 1
        return states if row == first else torch.cat([super().row_states(hidden, row, row + 1), states[1:]])


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


@drafted_fault(
    "medusa-head-of-next-depth",
    "arXiv 2401.10774, section 2.1: head k guesses the token k + 1 positions ahead; heads are counted from 0 or from 1",
    "at least two Medusa heads",
)
@in_place_of_draft
class Further(MedusaDraft):
    """The children of a node are named by the Medusa head of the next depth; the last head stays.

    Heads that count from 1, the target's own head being number 0, are read as if they counted from 0.
    """

    def of_depth(self, depth: int) -> Tensor:
        return super().of_depth(min(depth + 1, self.heads - 1))


@drafted_fault(
    "medusa-residual-dropped",
    "family of vllm-project/vllm #14464: the residual of a head's output is dropped",
    "a Medusa head",
)
@in_place_of_draft
class Bare(MedusaDraft):
    """The block of a Medusa head puts out `silu(W s + b)` without the state s beside it."""

    def block(self, state: Tensor, head: int) -> Tensor:
        return super().block(state, head) - state


@drafted_fault(
    "medusa-bias-dropped",
    "family of vllm-project/vllm issue #22558: the bias of a head's projection is not loaded",
    "a Medusa head with a bias",
)
@in_place_of_draft
class WithoutBias(MedusaDraft):
    """The block of a Medusa head leaves out the bias that its weights have."""

    def block(self, state: Tensor, head: int) -> Tensor:
        return state + functional.silu(functional.linear(state, self.weights[f"{HEADS_PREFIX}.{head}.0.linear.weight"]))


@drafted_fault(
    "medusa-reads-state-one-early",
    "family of catalogue BZ-063: the draft's inputs are shifted by one against the target's states",
    "a Medusa head, and a prompt of three tokens",
)
@in_place_of_draft
class EarlyMedusa(MedusaDraft):
    """Medusa heads read the state of the token before the last whose state is known.

    Where one state is known, they read that one.
    """

    def last_state(self, hidden: Tensor) -> Tensor:
        return hidden[-2:][:1]


@drafted_fault(
    "mtp-first-module-at-every-depth",
    "arXiv 2412.19437, section 2.2: module k predicts the k-th further token; the modules take turns by depth",
    "at least two MTP modules, and a tree with an inner node below the root",
)
@in_place_of_draft
class First(MtpDraft):
    """The children of every node are named by MTP module 0, whatever the depth of the node."""

    def child_scores(self, outputs: Tensor, depth: int) -> Tensor:
        return super().child_scores(outputs, 0)


@drafted_fault(
    "mtp-module-continues-itself",
    "arXiv 2412.19437, section 2.2: a module reads the output of the module before it",
    "at least two MTP modules, and a tree with an inner node below the root",
)
@in_place_of_draft
class Itself(MtpDraft):
    """The row of a node in an MTP module holds the output of the same module in its parent's row."""

    def node_states(self, level: list[int]) -> Tensor:
        return super().node_states(level).roll(-1, 1)


@drafted_fault(
    "mtp-missing-rows-seen",
    "family of catalogue BZ-036: later MTP layers attend to columns that hold no row of theirs",
    "at least two MTP modules",
)
@in_place_of_draft
class AllColumns(MtpDraft):
    """Later MTP modules attend to the columns of the first tokens, for which they have no row."""

    def module_mask(self, visible_columns: Tensor, own_columns: Tensor, rows: Tensor) -> Tensor:
        return visible_columns


@drafted_fault(
    "mtp-row-before-lost",
    "family of sgl-project/sglang PR #26329: a row at a seam needs what stands on the other side of it",
    "at least two MTP modules, and a second step or a prefill in chunks",
)
@in_place_of_draft
class LosesRowBefore(MtpDraft):
    """The first row of a step or of a prefill chunk has no output of the row before it in later MTP modules."""

    def append(self, rows: HeadRows) -> Tensor:
        if self.last_outputs is not None:
            self.last_outputs = torch.zeros_like(self.last_outputs)
        return super().append(rows)
