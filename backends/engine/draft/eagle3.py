"""The EAGLE-3 head of the engine."""

from collections.abc import Mapping

import torch
from torch import Tensor

from specverify.backends.engine.draft.base import Opening, Proposal, heads, opens
from specverify.backends.engine.draft.filling import Levels, run_levels
from specverify.backends.engine.draft.head import HeadDraft, open_head
from specverify.backends.engine.model.causal_lm import CausalLm
from specverify.backends.engine.model.head import HeadModel
from specverify.backends.engine.sampling.step import StepSampling
from specverify.reference.case import Case
from specverify.reference.draft.eagle3 import LAYER_PREFIX, MASK_STATE, Eagle3, layer_prefix
from specverify.reference.tree import Tree


class Eagle3Head(HeadModel):
    """An EAGLE-3 head: `fc` fuses states of several layers, and a head of its own scores the normed output.

    Attributes:
        norm_before_residual: Whether the residual is the normed state.
        norm_output: Whether the normed output is fed back.
    """

    layer_prefix = LAYER_PREFIX
    norm_before_residual = False
    norm_output = False

    def of_target(self, hidden: Tensor) -> Tensor:
        """See `HeadModel`; without `fc` the state itself, and in EAGLE 3.1 `fc` of states that were normed before."""
        if "fc.weight" not in self.weights:
            return hidden
        if "input_norm.weight" in self.weights:
            hidden = self.norm(hidden, "input_norm")
        if "fc_norm.0.weight" in self.weights:
            parts = hidden.chunk(self.reads.parts, -1)
            hidden = torch.cat([self.norm(state, f"fc_norm.{i}") for i, state in enumerate(parts)], -1)
        return self.linear(hidden, "fc")

    def prefix(self, module: int) -> str:
        """See `HeadModel`."""
        return layer_prefix(module)

    def fuse(self, embedded: Tensor, state: Tensor, module: int = 0) -> tuple[Tensor, Tensor]:
        """See `HeadModel`; a layer after the first reads the output of the layer before alone."""
        if module:
            return self.norm(state, f"{layer_prefix(module)}.input_layernorm"), state
        normed = self.norm(state, f"{LAYER_PREFIX}.hidden_norm")
        x = torch.cat([self.norm(embedded, f"{LAYER_PREFIX}.input_layernorm"), normed], -1)
        return x, normed if self.norm_before_residual else state

    def score(self, outputs: Tensor, module: int = 0) -> Tensor:
        """See `HeadModel`."""
        normed = self.norm(outputs, "norm")
        if "lm_head.weight" in self.weights:
            return self.linear(normed, "lm_head")
        return torch.nn.functional.linear(normed, self.target_head)

    def feed_back(self, outputs: Tensor, module: int = 0) -> Tensor:
        """See `HeadModel`."""
        return self.norm(outputs, "norm") if self.norm_output else outputs


@heads(Eagle3.TAG)
def make_head(case: Case, target: CausalLm, weights: Mapping[str, Tensor]) -> Eagle3Head:
    """The head of the case on its target."""
    draft = case.draft
    assert isinstance(draft, Eagle3)
    head = Eagle3Head(draft.layer, draft.reads, weights, target, draft.layers)
    head.norm_before_residual = draft.norm_before_residual
    head.norm_output = draft.norm_output
    return head


class ParallelDraft(HeadDraft):
    """Fills a tree with a head's scores of mask tokens, whose rows are run at once behind the root's (P-EAGLE).

    Attributes:
        depth_scores: The scores of the children of nodes at each depth, [mask slots + 1, draft vocabulary].
    """

    words: Eagle3
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


@opens(Eagle3.TAG)
def open_draft(opening: Opening) -> HeadDraft:
    """Open the head on the cache that the request has leased for it."""
    draft = opening.case.draft
    assert isinstance(draft, Eagle3)
    return open_head(opening, ParallelDraft if draft.mask_slots else HeadDraft)
