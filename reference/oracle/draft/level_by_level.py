"""The tree of a draft with scores, filled level by level.

The children of a node are named only after the node's own token, since its scores depend on that token. A dynamic tree
is made by brute force in float64: all candidates of a level are made and sorted before the next.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from specverify.reference.draft import Draft
from specverify.reference.draft_trees import Dispatch, DraftTree, Expansion, Stopped
from specverify.reference.oracle.draft.question import Question
from specverify.reference.trace import Array, Drafted, frozen
from specverify.reference.tree import RankTree, Shape, Tree

Path = tuple[int, ...]
"""Tokens below the root, as target ids or as draft ids."""

Confidence = Callable[[Path], float]
"""From a path of target ids below the root to the log-probability that the confidence head gives the next token."""

PathScores = Callable[[list[Path]], Array]
"""From paths of target ids below the root to the draft's logits after each, [paths, draft vocabulary]."""


def tree_of(
    draft: Draft,
    plan: DraftTree,
    vocab: int,
    question: Question,
    score: PathScores,
    fixed: tuple[int, ...] = (),
    confidence: Confidence | None = None,
) -> Drafted:
    """The tree `plan` of the draft: static, dynamic, or of the step's batch; the other arguments are `fill_tree`'s."""
    if isinstance(plan, Expansion):
        return expand(plan, np.array(draft.vocabulary or range(vocab)), question, score)
    if isinstance(plan, Stopped):
        return fill_tree(draft, plan.tree, vocab, question, score, stop=plan, confidence=confidence)
    shape = tree_of_step(plan, question.step) if isinstance(plan, Dispatch) else plan
    return fill_tree(draft, shape, vocab, question, score, fixed, confidence=confidence)


def fill_tree(
    draft: Draft,
    shape: Shape,
    vocab: int,
    question: Question,
    score: PathScores,
    fixed: tuple[int, ...] = (),
    stop: Stopped | None = None,
    confidence: Confidence | None = None,
) -> Drafted:
    """The tree of the best tokens by rank, or of tokens drawn from the draft's law; drawn tokens ignore ranks.

    Args:
        draft: The draft.
        shape: Its static tree, with the field `rank` unless its tokens are drawn or fixed.
        vocab: The size of the target's vocabulary.
        question: The facts of the step.
        score: The draft's scores.
        fixed: The token of each node, in place of both; empty to name them.
        stop: The confidence at which paths end, where they do: what lies behind is cut out of the tree.
        confidence: The confidences of a draft with a head for them.
    """
    sampled = question.sampled
    rank: tuple[int, ...] = getattr(shape, "rank", ())
    vocabulary = np.array(draft.vocabulary or range(vocab))
    token, draft_id = [question.tokens[-1]] * len(shape), [0] * len(shape)
    logits = np.full((len(shape), len(vocabulary)), np.nan)
    proposal = np.full((len(shape), vocab), 1.0 / vocab)  # any law will do for the root: no rule reads its row
    worth = {0: 0.0}
    survival = {0: 0.0}
    confidences = np.full(len(shape), np.nan)
    ended: set[int] = set()
    rows = [0]
    level = [0]
    while level:
        # Leaves are not scored: no child needs their logits. The root is scored even where the tree is the bare root.
        inner = [node for node in level if shape.children[node] and node not in ended] if level != [0] else [0]
        if inner:
            paths = [tuple(token[ancestor] for ancestor in shape.path(node)[1:]) for node in inner]
            for node, row in zip(inner, score(paths), strict=True):
                logits[node] = row
                children = shape.children[node]
                if confidence is not None:
                    confidences[node] = confidence(tuple(token[ancestor] for ancestor in shape.path(node)[1:]))
                if stop is not None:
                    law = row - np.logaddexp.reduce(row)
                    by_law = _ends(stop, "before", worth[node], float(law.max()))
                    if by_law or _ends(stop, "head", survival[node], float(confidences[node])):
                        ended.add(node)
                        continue
                if fixed:
                    ids = [int(np.flatnonzero(vocabulary == fixed[child])[0]) for child in children]
                elif sampled.is_drawn:
                    # Target ids that a reduced vocabulary cannot name have no mass.
                    target_scores = np.full(vocab, -np.inf)
                    target_scores[vocabulary] = row
                    path = tuple(token[ancestor] for ancestor in shape.path(node)[1:])
                    target_ids, proposal[list(children)] = sampled.siblings(children, target_scores, path)
                    ids = [int(np.flatnonzero(vocabulary == target_id)[0]) for target_id in target_ids]
                else:
                    best = np.argsort(-row, kind="stable")
                    ids = [int(best[rank[child]]) for child in children]
                for child, chosen_id in zip(children, ids, strict=True):
                    draft_id[child] = chosen_id
                    token[child] = int(vocabulary[chosen_id])
                    if stop is not None:
                        worth[child] = worth[node] + float(law[chosen_id])
                        survival[child] = survival[node] + float(confidences[node])
                        if _ends(stop, "after", worth[node], float(law[chosen_id])):
                            ended.add(child)
        level = [child for node in level if node not in ended for child in shape.children[node]]
        rows += level
    rows.sort()
    row_of = {node: row for row, node in enumerate(rows)}
    drawn_proposal = frozen(proposal[rows]) if sampled.is_drawn and not fixed else None
    tree = Tree(tuple(row_of[shape.parent[node]] for node in rows), tuple(token[node] for node in rows))
    drafted = Drafted(tree, frozen(logits[rows]), tuple(draft_id[node] for node in rows), drawn_proposal)
    return drafted if confidence is None else replace(drafted, confidence=frozen(confidences[rows]))


def _ends(stop: Stopped, when: str, above: float, own: float) -> bool:
    """Whether drafting ends `when` the last log-probability is `own`, behind a path of log-probability `above`."""
    return stop.when == when and (above + own if stop.cumulated else own) < np.log(stop.stop_below)


def tree_of_step(table: Dispatch, step: int) -> RankTree:
    """The tree of step `step`: that of the smallest bound that the batch does not exceed, or else the last."""
    # After the last known batch the sizes stay as they are.
    known_batches = table.batches[: step + 1]
    size = known_batches[-1] if known_batches else 1
    rows = dict(zip(table.up_to, table.trees, strict=True))
    return rows[min([bound for bound in rows if size <= bound], default=max(rows))]


def expand(expansion: Expansion, vocabulary: Array, question: Question, score: PathScores) -> Drafted:
    """The dynamic tree under the pending root.

    Args:
        expansion: The dynamic tree's settings.
        vocabulary: The target id of each draft id.
        question: The facts of the step.
        score: The draft's scores.
    """
    logits: dict[Path, Array] = {}
    worth: dict[Path, float] = {(): 0.0}
    all_paths: list[Path] = [()]
    level: list[Path] = [()]
    chosen_paths: list[Path] = []
    for _ in range(expansion.depth):
        rows = score([tuple(int(vocabulary[draft_id]) for draft_id in path) for path in level])
        candidates: list[Path] = []
        for path, row in zip(level, rows, strict=True):
            logits[path] = row
            law = log_law(row)
            for draft_id in np.argsort(-row, kind="stable")[: expansion.top_k].tolist():
                candidates.append((*path, draft_id))
                worth[candidates[-1]] = worth[path] + min(float(law[draft_id]), 0.0)
        all_paths += candidates
        # Sorting is stable: of equal scores the lower number stays in front.
        level = best_paths(candidates, worth, expansion.top_k)
        chosen_paths += level
    if expansion.rerank:
        chosen_paths = best_paths(all_paths[1:], worth, expansion.total - 1)
    rows_of = [(), *chosen_paths]
    tree = Tree(
        tuple(rows_of.index(path[:-1]) for path in rows_of),
        (question.tokens[-1], *(int(vocabulary[path[-1]]) for path in chosen_paths)),
    )
    table = np.stack([logits.get(path, np.full(len(vocabulary), np.nan)) for path in rows_of])
    return Drafted(tree, frozen(table), (0, *(path[-1] for path in chosen_paths)))


def best_paths(paths: list[Path], worth: dict[Path, float], most: int) -> list[Path]:
    """The `most` best of `paths`, in the order of their numbers, which is that of the list."""
    kept_paths = set(sorted(paths, key=lambda path: -worth[path])[:most])
    return [path for path in paths if path in kept_paths]


def log_law(logits: Array) -> Array:
    """The log-probabilities of logits [V]."""
    shifted = logits - logits.max()
    law: Array = shifted - np.log(np.exp(shifted).sum())
    return law
