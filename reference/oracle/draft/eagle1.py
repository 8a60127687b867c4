"""The formulas of an EAGLE-1 head (arXiv 2401.15077)."""

import numpy as np

from specverify.reference.draft.eagle1 import LAYER_PREFIX, Eagle1
from specverify.reference.oracle.draft.head import HeadFormulas, propose_by_head
from specverify.reference.oracle.draft.question import Question, proposes
from specverify.reference.oracle.formulas.layer import linear
from specverify.reference.trace import Array, Drafted


class Eagle1Formulas(HeadFormulas):
    """EAGLE-1: no norm before attention, and the target's own head on the output."""

    prefix = LAYER_PREFIX

    def target_states(self, hidden: Array) -> Array:
        """See `Formulas`."""
        return hidden

    def enter(self, embedded: Array, states: Array) -> tuple[Array, Array]:
        """See `Formulas`."""
        x = linear(np.concatenate([embedded, states], axis=-1), self.state, "fc")
        return x, x

    def score(self, output: Array) -> Array:
        """See `Formulas`."""
        logits: Array = self.target_head @ output
        return logits

    def feed_back(self, output: Array) -> Array:
        """See `Formulas`."""
        return output


@proposes(Eagle1.TAG)
def propose(draft: Eagle1, question: Question) -> Drafted:
    """The tree of an EAGLE-1 head on the oracle's hidden states."""
    return propose_by_head(Eagle1Formulas(draft, question), question)
