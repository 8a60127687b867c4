"""Greedy acceptance as it is defined: follow, from the root, the child that is the target's own choice."""

from reference.trace import Accepted, Array
from reference.tree import Tree


def choice(row: Array) -> int:
    """The greedy token of one row of logits: the largest, the lowest id among equals."""
    best = 0
    for token in range(1, len(row)):
        if row[token] > row[best]:
            best = token
    return best


def greedy_walk(tree: Tree, logits: Array) -> Accepted:
    """The accepted path and bonus token for `logits` [nodes, vocabulary]; the first of two equal siblings wins.

    >>> import numpy as np
    >>> greedy_walk(Tree((0, 0, 0), (5, 1, 2)), np.eye(3)[[2, 0, 1]])
    Accepted(path=(0, 2), bonus=1)
    """
    path = [0]
    while True:
        wanted = int(logits[path[-1]].argmax()) if len(logits[0]) > 4096 else choice(logits[path[-1]])
        taken = [child for child in tree.children[path[-1]] if tree.token[child] == wanted]
        if not taken:
            return Accepted(tuple(path), wanted)
        path.append(taken[0])
