"""The formulas of Medusa heads (arXiv 2401.10774)."""

from dataclasses import replace

import numpy as np

from specverify.reference.draft.hidden import HeadInput
from specverify.reference.draft.medusa import HEADS_PREFIX, Medusa
from specverify.reference.oracle.draft.level_by_level import tree_of
from specverify.reference.oracle.draft.question import Question, proposes
from specverify.reference.oracle.formulas.layer import linear, silu
from specverify.reference.oracle.parameters import parameters_outside_layers
from specverify.reference.trace import Array, Drafted, frozen
from specverify.reference.tree import Tree


def guess(draft: Medusa, question: Question, state: Array, head: int) -> Array:
    """The scores of head number `head` for the hidden state `state` [hidden]: [vocabulary]."""
    assert question.target is not None
    weights = question.weights_of(draft.weights)
    block = state
    for layer in range(draft.layers):
        block = block + silu(linear(block, weights, f"{HEADS_PREFIX}.{head}.{layer}.linear"))
    if draft.shared_head:
        scores: Array = parameters_outside_layers(question.target, question.dtype).head @ block
        return scores
    return linear(block, weights, f"{HEADS_PREFIX}.{head}.{draft.layers}")


@proposes(Medusa.TAG)
def propose(draft: Medusa, question: Question) -> Drafted:
    """The tree of Medusa heads; the bare root where no token before the root has a state."""
    tokens, hidden, target = question.tokens, question.hidden, question.target
    assert target is not None
    assert hidden is not None
    if not len(hidden):
        return Drafted(Tree((0,), tokens[-1:]))
    state = hidden[-1]

    def score(paths: list[tuple[int, ...]]) -> Array:
        # A path of d tokens ends at depth d, whose children head d guesses; its tokens do not matter.
        return np.stack([guess(draft, question, state, len(path)) for path in paths])

    drafted = tree_of(draft, draft.shape, target.vocab_size, question, score, draft.fixed)
    last = len(hidden) - 1
    return replace(drafted, given=HeadInput(draft.reads, last, tokens[last : last + 1], frozen(hidden[last:])))
