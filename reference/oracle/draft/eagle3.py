"""The formulas of an EAGLE-3 head (arXiv 2503.01840)."""

import numpy as np

from reference.draft.eagle3 import LAYER_PREFIX, Eagle3, layer_prefix
from reference.oracle.draft.head import Formulas, proposed_by
from reference.oracle.draft.question import Question, means
from reference.oracle.formulas.layer import linear
from reference.trace import Array, Drafted


class Eagle3Formulas(Formulas):
    """EAGLE-3: states of several layers fused, two norms before attention, a head of its own on the normed output."""

    at = LAYER_PREFIX
    draft: Eagle3

    def __init__(self, draft: Eagle3, question: Question) -> None:
        super().__init__(draft, question)
        self.further = tuple(layer_prefix(number) for number in range(1, draft.layers))

    def of_target(self, hidden: Array) -> Array:
        """See `Formulas`; a head without `fc` holds the state itself, and EAGLE 3.1 norms the states before `fc`."""
        if "fc.weight" not in self.state:
            return hidden
        if "input_norm.weight" in self.state:
            hidden = self.normed(hidden, "input_norm")
        if "fc_norm.0.weight" in self.state:
            parts = np.split(hidden, self.draft.reads.parts, axis=-1)
            hidden = np.concatenate([self.normed(one, f"fc_norm.{at}") for at, one in enumerate(parts)], axis=-1)
        return linear(hidden, self.state, "fc")

    def entered(self, embedded: Array, held: Array) -> tuple[Array, Array]:
        """See `Formulas`."""
        normed = self.normed(held, f"{LAYER_PREFIX}.hidden_norm")
        x = np.concatenate([self.normed(embedded, f"{LAYER_PREFIX}.input_layernorm"), normed], axis=-1)
        return x, normed if self.draft.norm_before_residual else held

    def scored(self, output: Array) -> Array:
        """See `Formulas`."""
        normed = self.normed(output, "norm")
        if "lm_head.weight" in self.state:
            return linear(normed, self.state, "lm_head")
        logits: Array = self.target_head @ normed
        return logits

    def fed_back(self, output: Array) -> Array:
        """See `Formulas`."""
        return self.normed(output, "norm") if self.draft.norm_output else output


@means(Eagle3.TAG)
def proposed(draft: Eagle3, question: Question) -> Drafted:
    """The tree of an EAGLE-3 head on the oracle's hidden states."""
    return proposed_by(Eagle3Formulas(draft, question), question)
