"""The proposal of a draft model: its tree, filled level by level.

Each node is scored by running its whole path from scratch.
"""

import numpy as np

from specverify.reference.draft import LanguageModel
from specverify.reference.oracle.draft.level_by_level import Path, tree_of
from specverify.reference.oracle.draft.question import Question, proposes
from specverify.reference.oracle.evaluator import Evaluator
from specverify.reference.trace import Array, Drafted
from specverify.reference.tree import Tree


@proposes(LanguageModel.TAG)
def propose(draft: LanguageModel, question: Question) -> Drafted:
    """The tree of the best tokens by rank, or of tokens drawn from the draft's law; drawn tokens ignore ranks."""
    assert question.model is not None
    evaluator, vocab = question.model, draft.model.vocab_size
    vocabulary = np.array(draft.vocabulary or range(vocab))

    def score(paths: list[Path]) -> Array:
        rows: Array = scores(evaluator, question.tokens, paths)[:, vocabulary]
        return rows

    return tree_of(draft, draft.shape, vocab, question, score)


def scores(evaluator: Evaluator, tokens: tuple[int, ...], paths: list[Path]) -> Array:
    """Draft logits [paths, vocabulary] after each path below the root `tokens[-1]`, run as one tree of these paths."""
    known_paths = sorted(
        {path[:end] for path in paths for end in range(len(path) + 1)}, key=lambda path: (len(path), path)
    )
    tree = Tree(
        tuple(known_paths.index(path[:-1]) for path in known_paths),
        tuple((tokens[-1], *path)[-1] for path in known_paths),
    )
    return evaluator.nodes(tokens[:-1], tree).logits[[known_paths.index(path) for path in paths]]
