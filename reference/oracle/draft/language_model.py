"""The proposal of a draft model: its static tree, filled level by level.

Each node is scored by running its whole path from scratch.
"""

import numpy as np

from reference.draft import LanguageModel
from reference.oracle.draft.question import Question, means
from reference.oracle.evaluator import Evaluator
from reference.trace import Array, Drafted, frozen
from reference.tree import RankTree, Tree


@means(LanguageModel.TAG)
def proposed(draft: LanguageModel, question: Question) -> Drafted:
    """The tree of the best tokens by rank, or of tokens drawn from the draft's law; drawn tokens ignore ranks.

    The children of a node are named only after the node's own token, since its logits depend on that token.
    """
    assert question.model is not None
    tokens, sampled, shape = question.tokens, question.sampled, draft.shape
    vocab = draft.model.vocab_size
    vocabulary = np.array(draft.vocabulary or range(vocab))
    token, draft_id = [tokens[-1]] * len(shape), [0] * len(shape)
    logits = np.full((len(shape), len(vocabulary)), np.nan)
    proposal = np.full((len(shape), vocab), 1.0 / vocab)  # any law will do for the root: no rule reads its row
    level = [0]
    while level:
        # Leaves are not scored: no child needs their logits. The root is scored even where the tree is the bare root.
        inner = [node for node in level if shape.children[node]] if level != [0] else [0]
        if inner:
            rows = scores(question.model, tokens[:-1], shape, token, inner)[:, vocabulary]
            for node, row in zip(inner, rows, strict=True):
                logits[node] = row
                below = shape.children[node]
                if sampled.drawn:
                    # Target ids that a reduced vocabulary cannot name have no mass.
                    spread = np.full(vocab, -np.inf)
                    spread[vocabulary] = row
                    path = tuple(token[up] for up in shape.path(node)[1:])
                    named, proposal[list(below)] = sampled.siblings(below, spread, path)
                    ids = [int(np.flatnonzero(vocabulary == one)[0]) for one in named]
                else:
                    best = np.argsort(-row, kind="stable")
                    ids = [int(best[shape.rank[child]]) for child in below]
                for child, own in zip(below, ids, strict=True):
                    draft_id[child], token[child] = own, int(vocabulary[own])
        level = [child for node in level for child in shape.children[node]]
    told = frozen(proposal) if sampled.drawn else None
    return Drafted(Tree(shape.parent, tuple(token)), frozen(logits), tuple(draft_id), told)


def scores(
    evaluator: Evaluator, context: tuple[int, ...], shape: RankTree, token: list[int], nodes: list[int]
) -> Array:
    """Draft logits at `nodes` [len(nodes), vocabulary], run on the part of the tree whose tokens are known."""
    known = sorted({up for node in nodes for up in shape.path(node)})
    part = Tree(tuple(known.index(shape.parent[node]) for node in known), tuple(token[node] for node in known))
    return evaluator.nodes(context, part).logits[[known.index(node) for node in nodes]]
