"""Faults of multi-token prediction: whose turn it is, and what a row holds."""

import torch
from torch import Tensor

from specverify.backends.engine.draft.base import HeadRows
from specverify.backends.engine.draft.mtp import MtpDraft
from specverify.backends.faults.drafting.model_drafts import in_place_of_draft
from specverify.backends.faults.fault import drafted_fault, faults_in


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


FAULTS = faults_in(globals())
