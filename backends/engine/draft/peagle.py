"""The P-EAGLE head of the engine: EAGLE-3 that runs mask tokens in place of the nodes of a tree."""

import torch
from torch import Tensor

from specverify.backends.engine.draft.base import Opening, Proposal, heads, opens
from specverify.backends.engine.draft.eagle3 import make_head
from specverify.backends.engine.draft.filling import Levels, run_levels
from specverify.backends.engine.draft.head import HeadDraft, open_head
from specverify.backends.engine.sampling.step import StepSampling
from specverify.reference.draft.peagle import MASK_STATE, PEagle
from specverify.reference.tree import Tree


class ParallelDraft(HeadDraft):
    """Fills a tree with a head's scores of mask tokens, whose rows are run at once behind the root's.

    Attributes:
        depth_scores: The scores of the children of nodes at each depth, [mask slots + 1, draft vocabulary].
    """

    words: PEagle
    depth_scores: Tensor

    def levels(self, tokens: list[int], chance: StepSampling | None = None, hidden: Tensor | None = None) -> Levels:
        """See `CachedTreeFilling`; no level is left to the caller."""
        yield from ()
        assert hidden is not None
        if len(tokens) == 1:
            return Proposal(Tree((0,), (tokens[-1],)))
        output = self.catch_up(tokens, hidden)
        root = self.cache.length - 1
        self.depth_scores = self.head.score(torch.cat([output, self.run_masks(root)]))
        filling = self.filling(tokens, self.depth_scores[:1], root, chance, self.words.fixed)
        proposal = run_levels(filling, self.feed)
        rows = self.head_rows(hidden)
        return Proposal(proposal.tree, proposal.logits, proposal.draft_ids, proposal.proposal, rows)

    def run_masks(self, root: int) -> Tensor:
        """Open the rows of mask tokens behind the row `root` and run them: their outputs, [mask slots, hidden]."""
        count = self.words.mask_slots
        positions = torch.arange(root + 1, root + 1 + count)
        visible = torch.arange(root + 1 + count)[None, :] <= positions[:, None]
        tokens = torch.full((count,), self.words.mask_token)
        attend, lanes = self.seams.draft_attend, self.seams.kv.single
        self.calls += 1
        return self.head.forward(tokens, self.mask_states(count), positions, visible, self.cache, attend, lanes)

    def mask_states(self, count: int) -> Tensor:
        """The states beside `count` mask tokens, [count, hidden]."""
        return self.head.of_target(self.head.weights[MASK_STATE].expand(count, -1))

    def feed(self, level: list[int], token: list[int], root: int) -> Tensor:
        """See `TreeFilling`; all nodes of a depth have the same scores."""
        return self.depth_scores[self.shape.depth[level[0]]].expand(len(level), -1)


heads(PEagle.TAG)(make_head)


@opens(PEagle.TAG)
def open_draft(opening: Opening) -> HeadDraft:
    """Open the head on the cache that the request has leased for it."""
    return open_head(opening, ParallelDraft)
