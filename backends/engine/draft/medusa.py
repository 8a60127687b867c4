"""The Medusa heads of the engine, which score every depth of the tree at once.

They read the last hidden state alone and keep no rows, so that a verification leaves nothing to roll back.
"""

import torch
from torch import Tensor
from torch.nn import functional

from specverify.backends.engine.draft.base import CachelessDraft, HeadRows, Opening, Proposal, opens
from specverify.backends.engine.draft.filling import TreeFilling, run_levels
from specverify.backends.engine.model.causal_lm import CausalLm
from specverify.backends.engine.model.models import weights_of_head
from specverify.backends.engine.sampling.step import StepSampling
from specverify.backends.engine.step_seams import StepSeams
from specverify.reference.draft.medusa import HEADS_PREFIX, Medusa
from specverify.reference.tree import Tree


class MedusaDraft(CachelessDraft, TreeFilling):
    """Fills a tree with the best tokens of the head of each depth, or with tokens drawn from that head's law.

    Attributes:
        weights: Tensors by their names in published checkpoints, in the target's dtype, on its device.
        heads: The number of heads.
        layers: The number of residual blocks of each head.
        scores: The scores of every head for this tree, [heads, vocabulary].
    """

    def __init__(self, draft: Medusa, weights: dict[str, Tensor], target: CausalLm, seams: StepSeams) -> None:
        self.target_head: Tensor = target.unsharded.get_output_embeddings().weight
        vocab_size = len(self.target_head)
        super().__init__(draft.shape, torch.arange(vocab_size), vocab_size, seams)
        self.reads = draft.reads
        self.weights = {name: tensor.to(target.device, target.dtype) for name, tensor in weights.items()}
        self.heads = draft.heads
        self.layers = draft.layers
        self._fixed = draft.fixed
        self.scores = torch.empty(0, vocab_size)

    @torch.no_grad()
    def propose(self, tokens: list[int], chance: StepSampling | None = None, hidden: Tensor | None = None) -> Proposal:
        """Propose the tree under `tokens[-1]`; the bare root where no token before it has a state."""
        assert hidden is not None
        if len(tokens) == 1:
            return Proposal(Tree((0,), (tokens[-1],)))
        state = self.last_state(hidden)
        self.scores = torch.cat([self.score(self.block(state, head), head) for head in range(self.heads)])
        self.calls += 1
        root = len(tokens) - 1
        proposal = run_levels(self.filling(tokens, self.of_depth(0)[None], root, chance, self._fixed), self.feed)
        head_rows = HeadRows(root - 1, tokens[-2:-1], state)
        return Proposal(proposal.tree, proposal.logits, proposal.draft_ids, proposal.proposal, head_rows)

    def last_state(self, hidden: Tensor) -> Tensor:
        """The state that all heads read, [1, hidden], of `hidden`, those of all tokens but the root."""
        return hidden[-1:]

    def block(self, state: Tensor, head: int) -> Tensor:
        """The residual blocks of a head on `state` [1, hidden]: [1, hidden]."""
        for layer in range(self.layers):
            state = state + functional.silu(self._linear(state, f"{HEADS_PREFIX}.{head}.{layer}.linear"))
        return state

    def score(self, block: Tensor, head: int) -> Tensor:
        """The scores [1, vocabulary] of the output [1, hidden] of a head's block."""
        name = f"{HEADS_PREFIX}.{head}.{self.layers}"
        if f"{name}.weight" in self.weights:
            return self._linear(block, name)
        return functional.linear(block, self.target_head)

    def of_depth(self, depth: int) -> Tensor:
        """The scores [vocabulary] of the children of nodes at `depth`."""
        return self.scores[depth]

    def feed(self, level: list[int], token: list[int], root: int) -> Tensor:
        """See `TreeFilling`; no head sees the nodes, so all nodes of a depth have the same scores."""
        return self.of_depth(self.shape.depth[level[0]]).expand(len(level), -1)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        """`x` [1, in] through the projection `name`, with its bias if it has one: [1, out]."""
        return functional.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))


@opens(Medusa.TAG)
def open_draft(opening: Opening) -> MedusaDraft:
    """Open the heads of the case on its target."""
    draft = opening.case.draft
    assert isinstance(draft, Medusa)
    assert opening.target is not None
    weights = weights_of_head(draft, opening.case.model, opening.target.dtype, opening.seams.dequantise)
    return MedusaDraft(draft, weights, opening.target, opening.seams)
