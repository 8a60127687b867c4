"""The dynamic tree of a draft with scores, by brute force in float64.

Each candidate is its path of tokens below the root. All candidates of a level are made and sorted before the next.
"""

from collections.abc import Callable

import numpy as np

from specverify.reference.draft_trees import Expansion
from specverify.reference.oracle.draft.question import Question
from specverify.reference.trace import Array, Drafted, frozen
from specverify.reference.tree import Tree

Path = tuple[int, ...]
"""Tokens below the root, as target ids or as draft ids."""

PathScores = Callable[[list[Path]], Array]
"""From paths of target ids below the root to the draft's logits after each, [paths, draft vocabulary]."""


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
