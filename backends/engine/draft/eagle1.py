"""The EAGLE-1 head of the engine."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from specverify.backends.engine.draft.base import heads, opens
from specverify.backends.engine.draft.head import open_head
from specverify.backends.engine.model.causal_lm import CausalLm
from specverify.backends.engine.model.head import HeadModel
from specverify.reference.case import Case
from specverify.reference.draft.eagle1 import Eagle1, layer_prefix


class Eagle1Head(HeadModel):
    """An EAGLE-1 head: `fc` mixes embedding and state, and the target's own head scores the output.

    Attributes:
        settings: The words of the draft.
    """

    settings: Eagle1

    def of_target(self, hidden: Tensor) -> Tensor:
        """See `HeadModel`."""
        return hidden

    def prefix(self, module: int) -> str:
        """See `HeadModel`."""
        return layer_prefix(module)

    def rotates(self, module: int) -> bool:
        """See `HeadModel`."""
        return module not in self.settings.unrotated

    def fuse(self, embedded: Tensor, state: Tensor, module: int = 0) -> tuple[Tensor, Tensor]:
        """See `HeadModel`; a layer after the first reads the output of the layer before alone."""
        if module:
            return self.norm(state, f"{layer_prefix(module)}.input_layernorm"), state
        x = self.linear(torch.cat([embedded, state], -1), "fc")
        return x, x

    def feed_forward(self, x: Tensor, module: int) -> Tensor:
        """See `HeadModel`; every row runs through every expert, so that no row's bits follow the others."""
        if not self.settings.experts:
            return super().feed_forward(x, module)
        factors, experts = self.route(x, module)
        added = self.expert(x, module, "shared_expert")
        for number in range(self.settings.experts):
            is_taken = experts == number
            factor = (factors * is_taken).sum(-1, keepdim=True)
            added = added + torch.where(
                is_taken.any(-1, keepdim=True), self.weighted_expert(x, factor, module, number), torch.zeros_like(added)
            )
        return added

    def route(self, x: Tensor, module: int) -> tuple[Tensor, Tensor]:
        """The factors [R, taken] of the experts that rows [R, hidden] take in `module`, and the experts, int64."""
        scores, experts = self.linear(x, f"{self.prefix(module)}.mlp.gate").topk(self.settings.experts_per_token, -1)
        wide = scores if scores.dtype == torch.float64 else scores.float()
        return torch.sigmoid(wide).to(x.dtype), experts

    def weighted_expert(self, x: Tensor, factor: Tensor, module: int, number: int) -> Tensor:
        """The addition of expert `number` to rows [R, hidden] taken with `factor` [R, 1], as Llama 4 applies it."""
        return self.expert(factor * x, module, f"experts.{number}")

    def expert(self, x: Tensor, module: int, name: str) -> Tensor:
        """The gated block of the expert `name` of `module`, [R, hidden]."""
        prefix = f"{self.prefix(module)}.mlp.{name}"
        gate, up = (self.linear(x, f"{prefix}.{part}_proj") for part in ("gate", "up"))
        return self.linear(functional.silu(gate) * up, f"{prefix}.down_proj")

    def score(self, outputs: Tensor, module: int = 0) -> Tensor:
        """See `HeadModel`."""
        return self.unembed(outputs, self.target_head)

    def feed_back(self, outputs: Tensor, module: int = 0) -> Tensor:
        """See `HeadModel`."""
        return outputs


@heads(Eagle1.TAG)
def make_head(case: Case, target: CausalLm, weights: Mapping[str, Tensor]) -> Eagle1Head:
    """The head of the case on its target."""
    draft = case.draft
    assert isinstance(draft, Eagle1)
    head = Eagle1Head(draft.layer, draft.reads, weights, target, draft.layers)
    head.settings = draft
    return head


opens(Eagle1.TAG)(open_head)
