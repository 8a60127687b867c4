"""The proposal of an n-gram trie, counted anew from all tokens so far."""

from collections.abc import Callable

from specverify.reference.draft import Ngram
from specverify.reference.draft.trie import Trie
from specverify.reference.oracle.draft.question import Question, proposes
from specverify.reference.trace import Drafted
from specverify.reference.tree import Tree


@proposes(Ngram.TAG)
def propose(draft: Ngram, question: Question) -> Drafted:
    """The static tree without each node whose rank has no follower, and without the nodes below it."""
    return look_up_tree(draft, question.tokens, lambda context: followers(question.tokens, context))


def look_up_tree(
    draft: Ngram | Trie, tokens: tuple[int, ...], followers_of: Callable[[tuple[int, ...]], list[int]]
) -> Drafted:
    """The static tree: `followers_of` the longest suffix that has any name its nodes, by rank."""
    token = {0: tokens[-1]}

    def candidates(path: tuple[int, ...]) -> list[int]:
        sequence = tokens[:-1] + tuple(token[node] for node in path)
        for width in range(min(draft.order - 1, len(sequence)), 0, -1):
            ranked = followers_of(sequence[-width:])
            if ranked:
                return ranked
        return []

    # By depth, since rows need not stand in the order of their depths and a parent must be named first.
    for node in sorted(range(1, len(draft.shape)), key=lambda node: draft.shape.depth[node]):
        path = draft.shape.path(node)[:-1]
        if path[-1] in token:
            names = candidates(path)
            if draft.shape.rank[node] < len(names):
                token[node] = names[draft.shape.rank[node]]
    nodes = sorted(token)
    return Drafted(Tree(draft.shape.subtree(nodes).parent, tuple(token[node] for node in nodes)))


def followers(tokens: tuple[int, ...], context: tuple[int, ...]) -> list[int]:
    """Tokens that follow `context` somewhere in `tokens`: the most frequent first, then the most recent.

    >>> followers((1, 2, 1, 3, 1, 2), (1,))
    [2, 3]
    """
    width = len(context)
    followers_met = [tokens[i + width] for i in range(len(tokens) - width) if tokens[i : i + width] == context]
    latest = {token: i for i, token in enumerate(followers_met)}
    return sorted(latest, key=lambda token: (-followers_met.count(token), -latest[token]))
