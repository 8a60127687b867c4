"""The formulas of an EAGLE-3 head (arXiv 2503.01840)."""

import numpy as np

from specverify.reference.draft.eagle3 import LAYER_PREFIX, Eagle3, layer_prefix
from specverify.reference.oracle.draft.head import HeadFormulas, propose_by_head
from specverify.reference.oracle.draft.question import Question, proposes
from specverify.reference.oracle.formulas.layer import linear
from specverify.reference.trace import Array, Drafted


class Eagle3Formulas(HeadFormulas):
    """EAGLE-3: states of several layers fused, two norms before attention, a head of its own on the normed output."""

    prefix = LAYER_PREFIX
    draft: Eagle3

    def __init__(self, draft: Eagle3, question: Question) -> None:
        super().__init__(draft, question)
        self.further_prefixes = tuple(layer_prefix(number) for number in range(1, draft.layers))

    def target_states(self, hidden: Array) -> Array:
        """See `Formulas`; a head without `fc` holds the state itself, and EAGLE 3.1 norms the states before `fc`."""
        if "fc.weight" not in self.state:
            return hidden
        if "input_norm.weight" in self.state:
            hidden = self.norm(hidden, "input_norm")
        if "fc_norm.0.weight" in self.state:
            parts = np.split(hidden, self.draft.reads.parts, axis=-1)
            hidden = np.concatenate([self.norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)], axis=-1)
        return linear(hidden, self.state, "fc")

    def enter(self, embedded: Array, states: Array) -> tuple[Array, Array]:
        """See `Formulas`."""
        normed = self.norm(states, f"{LAYER_PREFIX}.hidden_norm")
        x = np.concatenate([self.norm(embedded, f"{LAYER_PREFIX}.input_layernorm"), normed], axis=-1)
        return x, normed if self.draft.norm_before_residual else states

    def score(self, output: Array) -> Array:
        """See `Formulas`."""
        normed = self.norm(output, "norm")
        if "lm_head.weight" in self.state:
            return linear(normed, self.state, "lm_head")
        logits: Array = normed @ self.target_head.T
        return logits

    def feed_back(self, output: Array) -> Array:
        """See `Formulas`."""
        return self.norm(output, "norm") if self.draft.norm_output else output


@proposes(Eagle3.TAG)
def propose(draft: Eagle3, question: Question) -> Drafted:
    """The tree of an EAGLE-3 head on the oracle's hidden states."""
    return propose_by_head(Eagle3Formulas(draft, question), question)
