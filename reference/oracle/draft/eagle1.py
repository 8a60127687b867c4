"""The formulas of an EAGLE-1 head (arXiv 2401.15077)."""

import numpy as np

from reference.draft.eagle1 import LAYER_PREFIX, Eagle1
from reference.oracle.draft.head import Formulas, proposed_by
from reference.oracle.draft.question import Question, means
from reference.oracle.formulas.layer import linear
from reference.trace import Array, Drafted


class Eagle1Formulas(Formulas):
    """EAGLE-1: no norm before attention, and the target's own head on the output."""

    at = LAYER_PREFIX

    def of_target(self, hidden: Array) -> Array:
        """See `Formulas`."""
        return hidden

    def entered(self, embedded: Array, held: Array) -> tuple[Array, Array]:
        """See `Formulas`."""
        x = linear(np.concatenate([embedded, held], axis=-1), self.state, "fc")
        return x, x

    def scored(self, output: Array) -> Array:
        """See `Formulas`."""
        logits: Array = self.target_head @ output
        return logits

    def fed_back(self, output: Array) -> Array:
        """See `Formulas`."""
        return output


@means(Eagle1.TAG)
def proposed(draft: Eagle1, question: Question) -> Drafted:
    """The tree of an EAGLE-1 head on the oracle's hidden states."""
    return proposed_by(Eagle1Formulas(draft, question), question)
