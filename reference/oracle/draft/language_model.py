"""The proposal of a draft model: its static tree, filled level by level.

Each node is scored by running its whole path from scratch.
"""

import numpy as np

from reference.draft import LanguageModel
from reference.oracle.draft.level_by_level import filled
from reference.oracle.draft.question import Question, means
from reference.oracle.evaluator import Evaluator
from reference.trace import Array, Drafted
from reference.tree import RankTree, Tree


@means(LanguageModel.TAG)
def proposed(draft: LanguageModel, question: Question) -> Drafted:
    """The tree of the best tokens by rank, or of tokens drawn from the draft's law; drawn tokens ignore ranks."""
    assert question.model is not None
    evaluator, vocab, shape = question.model, draft.model.vocab_size, draft.shape
    vocabulary = np.array(draft.vocabulary or range(vocab))

    def score(token: list[int], nodes: list[int]) -> Array:
        rows: Array = scores(evaluator, question.tokens[:-1], shape, token, nodes)[:, vocabulary]
        return rows

    return filled(draft, shape, vocab, question, score)


def scores(
    evaluator: Evaluator, context: tuple[int, ...], shape: RankTree, token: list[int], nodes: list[int]
) -> Array:
    """Draft logits at `nodes` [len(nodes), vocabulary], run on the part of the tree whose tokens are known."""
    known = sorted({up for node in nodes for up in shape.path(node)})
    part = Tree(tuple(known.index(shape.parent[node]) for node in known), tuple(token[node] for node in known))
    return evaluator.nodes(context, part).logits[[known.index(node) for node in nodes]]
