"""The tree of a draft with scores, filled level by level.

The children of a node are named only after the node's own token, since its scores depend on that token.
"""

import numpy as np

from reference.draft import Draft
from reference.draft_trees import Dispatch, DraftTree, Expansion
from reference.oracle.draft.expansion import PathScores, expanded
from reference.oracle.draft.question import Question
from reference.trace import Drafted, frozen
from reference.tree import RankTree, Shape, Tree


def tree_of(
    draft: Draft, plan: DraftTree, vocab: int, question: Question, score: PathScores, fixed: tuple[int, ...] = ()
) -> Drafted:
    """The tree `plan` of the draft: static, dynamic, or of the step's batch; the other arguments are `filled`'s."""
    if isinstance(plan, Expansion):
        return expanded(plan, np.array(draft.vocabulary or range(vocab)), question, score)
    shape = chosen(plan, question.step) if isinstance(plan, Dispatch) else plan
    return filled(draft, shape, vocab, question, score, fixed)


def filled(
    draft: Draft, shape: Shape, vocab: int, question: Question, score: PathScores, fixed: tuple[int, ...] = ()
) -> Drafted:
    """The tree of the best tokens by rank, or of tokens drawn from the draft's law; drawn tokens ignore ranks.

    Args:
        draft: The draft.
        shape: Its static tree, with the field `rank` unless its tokens are drawn or fixed.
        vocab: The size of the target's vocabulary.
        question: The facts of the step.
        score: The draft's scores.
        fixed: The token of each node, in place of both; empty to name them.
    """
    sampled = question.sampled
    rank: tuple[int, ...] = getattr(shape, "rank", ())
    vocabulary = np.array(draft.vocabulary or range(vocab))
    token, draft_id = [question.tokens[-1]] * len(shape), [0] * len(shape)
    logits = np.full((len(shape), len(vocabulary)), np.nan)
    proposal = np.full((len(shape), vocab), 1.0 / vocab)  # any law will do for the root: no rule reads its row
    level = [0]
    while level:
        # Leaves are not scored: no child needs their logits. The root is scored even where the tree is the bare root.
        inner = [node for node in level if shape.children[node]] if level != [0] else [0]
        if inner:
            paths = [tuple(token[up] for up in shape.path(node)[1:]) for node in inner]
            for node, row in zip(inner, score(paths), strict=True):
                logits[node] = row
                below = shape.children[node]
                if fixed:
                    ids = [int(np.flatnonzero(vocabulary == fixed[child])[0]) for child in below]
                elif sampled.drawn:
                    # Target ids that a reduced vocabulary cannot name have no mass.
                    spread = np.full(vocab, -np.inf)
                    spread[vocabulary] = row
                    path = tuple(token[up] for up in shape.path(node)[1:])
                    named, proposal[list(below)] = sampled.siblings(below, spread, path)
                    ids = [int(np.flatnonzero(vocabulary == one)[0]) for one in named]
                else:
                    best = np.argsort(-row, kind="stable")
                    ids = [int(best[rank[child]]) for child in below]
                for child, own in zip(below, ids, strict=True):
                    draft_id[child], token[child] = own, int(vocabulary[own])
        level = [child for node in level for child in shape.children[node]]
    told = frozen(proposal) if sampled.drawn and not fixed else None
    return Drafted(Tree(shape.parent, tuple(token)), frozen(logits), tuple(draft_id), told)


def chosen(table: Dispatch, step: int) -> RankTree:
    """The tree of step `step`: that of the smallest bound that the batch does not exceed, or else the last."""
    # After the last known batch the sizes stay as they are.
    known = table.batches[: step + 1]
    size = known[-1] if known else 1
    rows = dict(zip(table.up_to, table.trees, strict=True))
    return rows[min([bound for bound in rows if size <= bound], default=max(rows))]
