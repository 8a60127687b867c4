"""The EAGLE-3 head of the engine."""

import torch
from torch import Tensor

from backends.engine.draft.base import Opening, heads, opens
from backends.engine.draft.head import HeadDraft, opened_on
from backends.engine.model.causal_lm import CausalLm
from backends.engine.model.head import HeadModel
from reference.architecture import Seeded
from reference.case import Case
from reference.draft.eagle3 import AT, Eagle3
from reference.weights import seeded_head


class Eagle3Head(HeadModel):
    """An EAGLE-3 head: `fc` fuses states of several layers, and a head of its own scores the normed output.

    Attributes:
        norm_before_residual: Whether the residual is the normed state.
        norm_output: Whether the normed output is fed back.
    """

    at = AT
    norm_before_residual = False
    norm_output = False

    def of_target(self, hidden: Tensor) -> Tensor:
        """See `HeadModel`."""
        return self.linear(hidden, "fc")

    def fuse(self, embedded: Tensor, held: Tensor, module: int = 0) -> tuple[Tensor, Tensor]:
        """See `HeadModel`."""
        normed = self.norm(held, f"{AT}.hidden_norm")
        x = torch.cat([self.norm(embedded, f"{AT}.input_layernorm"), normed], -1)
        return x, normed if self.norm_before_residual else held

    def score(self, outputs: Tensor, module: int = 0) -> Tensor:
        """See `HeadModel`."""
        return self.linear(self.norm(outputs, "norm"), "lm_head")

    def feed_back(self, outputs: Tensor, module: int = 0) -> Tensor:
        """See `HeadModel`."""
        return self.norm(outputs, "norm") if self.norm_output else outputs


@heads(Eagle3.TAG)
def made(case: Case, target: CausalLm) -> Eagle3Head:
    """The seeded head of the case on its target."""
    draft = case.draft
    assert isinstance(draft, Eagle3)
    assert isinstance(case.model, Seeded)
    weights = {name: torch.tensor(one) for name, one in seeded_head(draft, case.model).items()}
    head = Eagle3Head(draft.layer, draft.reads, weights, target)
    head.norm_before_residual, head.norm_output = draft.norm_before_residual, draft.norm_output
    return head


@opens(Eagle3.TAG)
def opened(opening: Opening) -> HeadDraft:
    """Open the head on the cache that the request has leased for it."""
    return opened_on(opening)
