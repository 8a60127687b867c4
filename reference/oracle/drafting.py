"""What each draft must propose for given tokens, computed from scratch every time."""

import numpy as np

from reference.architecture import Architecture
from reference.draft import Draft, LanguageModel, Ngram, Scripted
from reference.oracle.evaluator import Evaluator
from reference.trace import Array, Drafted, frozen
from reference.tree import RankTree, Tree


def propose(draft: Draft, tokens: tuple[int, ...], step: int, evaluator: Evaluator | None) -> Drafted:
    """The tree proposed under the pending root `tokens[-1]` at `step`.

    `evaluator` runs the draft model; only a LanguageModel draft needs one.
    """
    if isinstance(draft, Scripted):
        bare = Tree((0,), (tokens[-1],))
        return Drafted((draft.trees[step] if step < len(draft.trees) else bare).rooted(tokens[-1]))
    if isinstance(draft, Ngram):
        return Drafted(_from_ngrams(draft, tokens))
    assert isinstance(draft, LanguageModel)
    assert evaluator is not None
    return _from_model(draft, tokens, evaluator)


def in_chunk(drafted: Drafted, position: int, architecture: Architecture) -> Drafted:
    """What stays of `drafted`, its root at `position`, if nodes outside the root's chunk are cut.

    A node stays if position // c is the same for it and for the root, c being the shortest chunk of any layer.
    """
    chunks = [chunk for _, chunk in architecture.reaches if chunk]
    tree = drafted.tree
    if not chunks:
        return drafted
    size = min(chunks)
    kept = [node for node in range(len(tree)) if (position + tree.depth[node]) // size == position // size]

    def rows(table: Array | None) -> Array | None:
        return None if table is None else frozen(table[kept])

    return Drafted(
        Tree(tuple(kept.index(tree.parent[node]) for node in kept), tuple(tree.token[node] for node in kept)),
        rows(drafted.logits),
        None if drafted.draft_ids is None else tuple(drafted.draft_ids[node] for node in kept),
        rows(drafted.proposal),
    )


def followers(tokens: tuple[int, ...], context: tuple[int, ...]) -> list[int]:
    """Tokens that follow `context` somewhere in `tokens`: the most frequent first, then the most recent.

    >>> followers((1, 2, 1, 3, 1, 2), (1,))
    [2, 3]
    """
    width = len(context)
    met = [tokens[at + width] for at in range(len(tokens) - width) if tokens[at : at + width] == context]
    latest = {token: at for at, token in enumerate(met)}
    return sorted(latest, key=lambda token: (-met.count(token), -latest[token]))


def _from_ngrams(draft: Ngram, tokens: tuple[int, ...]) -> Tree:
    token = {0: tokens[-1]}

    def candidates(path: tuple[int, ...]) -> list[int]:
        sequence = tokens[:-1] + tuple(token[node] for node in path)
        for width in range(min(draft.order - 1, len(sequence)), 0, -1):
            found = followers(tokens, sequence[-width:])
            if found:
                return found
        return []

    for node in sorted(range(1, len(draft.shape)), key=lambda node: draft.shape.depth[node]):
        above = draft.shape.path(node)[:-1]
        if above[-1] in token:
            named = candidates(above)
            if draft.shape.rank[node] < len(named):
                token[node] = named[draft.shape.rank[node]]
    kept = sorted(token)
    parents = tuple(kept.index(draft.shape.parent[node]) for node in kept)
    return Tree(parents, tuple(token[node] for node in kept))


def _from_model(draft: LanguageModel, tokens: tuple[int, ...], evaluator: Evaluator) -> Drafted:
    """Level by level: a node's children are named once its own token, hence its logits, are known."""
    shape: RankTree = draft.shape
    vocabulary = np.array(draft.vocabulary or range(draft.model.vocab_size))
    token, draft_id = [tokens[-1]] * len(shape), [0] * len(shape)
    logits = np.full((len(shape), len(vocabulary)), np.nan)
    level = [0]
    while level:
        inner = [node for node in level if shape.children[node]] if level != [0] else [0]
        if inner:
            rows = scores(evaluator, tokens[:-1], shape, token, inner)[:, vocabulary]
            for node, row in zip(inner, rows, strict=True):
                logits[node] = row
                best = np.argsort(-row, kind="stable")
                for child in shape.children[node]:
                    draft_id[child] = int(best[shape.rank[child]])
                    token[child] = int(vocabulary[draft_id[child]])
        level = [child for node in level for child in shape.children[node]]
    return Drafted(Tree(shape.parent, tuple(token)), frozen(logits), tuple(draft_id))


def scores(
    evaluator: Evaluator, context: tuple[int, ...], shape: RankTree, token: list[int], nodes: list[int]
) -> Array:
    """Draft logits at `nodes` [len(nodes), vocabulary], run on the part of the tree that is named already."""
    known = sorted({up for node in nodes for up in shape.path(node)})
    part = Tree(tuple(known.index(shape.parent[node]) for node in known), tuple(token[node] for node in known))
    return evaluator.nodes(context, part).logits[[known.index(node) for node in nodes]]
