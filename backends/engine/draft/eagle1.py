"""The EAGLE-1 head of the engine."""

from collections.abc import Mapping

import torch
from torch import Tensor

from specverify.backends.engine.draft.base import heads, opens
from specverify.backends.engine.draft.head import open_head
from specverify.backends.engine.model.causal_lm import CausalLm
from specverify.backends.engine.model.head import HeadModel
from specverify.reference.case import Case
from specverify.reference.draft.eagle1 import LAYER_PREFIX, Eagle1


class Eagle1Head(HeadModel):
    """An EAGLE-1 head: `fc` mixes embedding and state, and the target's own head scores the output."""

    layer_prefix = LAYER_PREFIX

    def of_target(self, hidden: Tensor) -> Tensor:
        """See `HeadModel`."""
        return hidden

    def fuse(self, embedded: Tensor, state: Tensor, module: int = 0) -> tuple[Tensor, Tensor]:
        """See `HeadModel`."""
        x = self.linear(torch.cat([embedded, state], -1), "fc")
        return x, x

    def score(self, outputs: Tensor, module: int = 0) -> Tensor:
        """See `HeadModel`."""
        return torch.nn.functional.linear(outputs, self.target_head)

    def feed_back(self, outputs: Tensor, module: int = 0) -> Tensor:
        """See `HeadModel`."""
        return outputs


@heads(Eagle1.TAG)
def make_head(case: Case, target: CausalLm, weights: Mapping[str, Tensor]) -> Eagle1Head:
    """The head of the case on its target."""
    draft = case.draft
    assert isinstance(draft, Eagle1)
    return Eagle1Head(draft.layer, draft.reads, weights, target)


opens(Eagle1.TAG)(open_head)
