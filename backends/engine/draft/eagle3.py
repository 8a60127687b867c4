"""The EAGLE-3 head of the engine."""

from collections.abc import Mapping

import torch
from torch import Tensor

from specverify.backends.engine.draft.base import heads, opens
from specverify.backends.engine.draft.head import open_head
from specverify.backends.engine.model.causal_lm import CausalLm
from specverify.backends.engine.model.head import HeadModel
from specverify.reference.case import Case
from specverify.reference.draft.eagle3 import LAYER_PREFIX, Eagle3, layer_prefix


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
            return self.unembed(normed, self.weights["lm_head.weight"], self.weights.get("lm_head.bias"))
        return self.unembed(normed, self.target_head)

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


opens(Eagle3.TAG)(open_head)
