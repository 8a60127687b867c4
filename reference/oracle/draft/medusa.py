"""The formulas of Medusa heads (arXiv 2401.10774)."""

from dataclasses import replace

import numpy as np

from reference.architecture import Seeded
from reference.draft.hidden import HeadInput
from reference.draft.medusa import AT, Medusa
from reference.oracle.draft.level_by_level import tree_of
from reference.oracle.draft.question import Question, means
from reference.oracle.formulas.layer import linear, silu
from reference.trace import Array, Drafted, frozen
from reference.tree import Tree
from reference.weights import seeded, seeded_head


def guess(draft: Medusa, target: Seeded, state: Array, head: int) -> Array:
    """The scores of head number `head` for the hidden state `state` [hidden]: [vocabulary]."""
    own = seeded_head(draft, target)
    block = state + silu(linear(state, own, f"{AT}.{head}.0.linear"))
    if draft.shared_head:
        shared = seeded(target)["model.embed_tokens.weight" if target.architecture.tied else "lm_head.weight"]
        scores: Array = shared @ block
        return scores
    return linear(block, own, f"{AT}.{head}.1")


@means(Medusa.TAG)
def proposed(draft: Medusa, question: Question) -> Drafted:
    """The tree of Medusa heads; the bare root where no token before the root has a state."""
    tokens, hidden, target = question.tokens, question.hidden, question.target
    assert isinstance(target, Seeded)
    assert hidden is not None
    if not len(hidden):
        return Drafted(Tree((0,), tokens[-1:]))
    state = hidden[-1]

    def score(below: list[tuple[int, ...]]) -> Array:
        # A path of d tokens ends at depth d, whose children head d guesses; its tokens do not matter.
        return np.stack([guess(draft, target, state, len(path)) for path in below])

    drafted = tree_of(draft, draft.shape, target.vocab_size, question, score, draft.fixed)
    last = len(hidden) - 1
    return replace(drafted, given=HeadInput(draft.reads, last, tokens[last : last + 1], frozen(hidden[last:])))
