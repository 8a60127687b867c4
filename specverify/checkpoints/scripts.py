"""Scripted trees of a prompted run, made of the model's own top tokens."""

import numpy as np

from specverify.properties.strategies.acceptance import accepted_path
from specverify.reference.draft import Scripted
from specverify.reference.trace import Array, Trace
from specverify.reference.tree import Tree


def own_top_tokens(plain: Trace, root: int, seed: int) -> Scripted:
    """Trees of the model's own top tokens along its plain decoding `plain`; `root` is the prompt's last token.

    Each tree holds the next one to five tokens, with second and third best tokens beside them, a rejected branch below
    one of those, and sometimes a wrong token in the middle. So every depth of acceptance occurs. Rows are shuffled.
    """
    rng = np.random.default_rng(seed)
    rows = [step.scored.logits[0] for step in plain.steps if step.scored is not None]
    output = (root, *plain.output)
    trees = []
    position = 0
    while position < len(rows):
        depth = int(rng.integers(1, 6))
        parent = [0]
        token = [output[position]]
        spine = 0
        # From this level on the spine holds the second-best token; mostly it lies beyond the tree.
        wrong_from = int(rng.integers(1, 3 * depth + 2))
        for level in range(1, min(depth, len(rows) - position) + 1):
            next_token = output[position + level]  # under a grammar not always the row's best token
            best = [
                next_token,
                *[token_id for token_id in _top(rows[position + level - 1], 3) if token_id != next_token],
            ]
            first = best[0] if level < wrong_from else best[min(1, len(best) - 1)]
            siblings = [first, *[token_id for token_id in best[1:] if token_id != first][: int(rng.integers(0, 3))]]
            below = len(parent)
            for sibling in siblings:
                parent.append(spine)
                token.append(int(sibling))
            if len(siblings) > 1:
                parent.append(below + 1)
                token.append(int(best[0]))
            spine = below
        natural = Tree(tuple(parent), tuple(token))
        order = (0, *(1 + rng.permutation(len(natural) - 1)).tolist())
        trees.append(natural.renumber(order))
        # The next step begins after the accepted nodes and the bonus.
        position += len(accepted_path(natural, output[position + 1 :]))
    return Scripted(tuple(trees))


def _top(row: Array, count: int) -> list[int]:
    best = np.argpartition(-row, min(count, len(row)) - 1)[:count]
    return [int(token) for token in best[np.argsort(-row[best], kind="stable")]]
