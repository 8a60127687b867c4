"""The proposal of an n-gram trie, counted anew from all tokens so far."""

from collections.abc import Callable

from reference.draft import Ngram
from reference.draft.trie import Trie
from reference.oracle.draft.question import Question, means
from reference.trace import Drafted
from reference.tree import Tree


@means(Ngram.TAG)
def proposed(draft: Ngram, question: Question) -> Drafted:
    """The static tree without each node whose rank has no follower, and without the nodes below it."""
    return looked_up(draft, question.tokens, lambda context: followers(question.tokens, context))


def looked_up(
    draft: Ngram | Trie, tokens: tuple[int, ...], following: Callable[[tuple[int, ...]], list[int]]
) -> Drafted:
    """The static tree whose nodes are named by the tokens `following` the longest suffix that any follows, by rank."""
    token = {0: tokens[-1]}

    def candidates(path: tuple[int, ...]) -> list[int]:
        sequence = tokens[:-1] + tuple(token[node] for node in path)
        for width in range(min(draft.order - 1, len(sequence)), 0, -1):
            found = following(sequence[-width:])
            if found:
                return found
        return []

    # By depth, since rows need not stand in the order of their depths and a parent must be named first.
    for node in sorted(range(1, len(draft.shape)), key=lambda node: draft.shape.depth[node]):
        above = draft.shape.path(node)[:-1]
        if above[-1] in token:
            named = candidates(above)
            if draft.shape.rank[node] < len(named):
                token[node] = named[draft.shape.rank[node]]
    kept = sorted(token)
    return Drafted(Tree(draft.shape.subtree(kept).parent, tuple(token[node] for node in kept)))


def followers(tokens: tuple[int, ...], context: tuple[int, ...]) -> list[int]:
    """Tokens that follow `context` somewhere in `tokens`: the most frequent first, then the most recent.

    >>> followers((1, 2, 1, 3, 1, 2), (1,))
    [2, 3]
    """
    width = len(context)
    met = [tokens[at + width] for at in range(len(tokens) - width) if tokens[at : at + width] == context]
    latest = {token: at for at, token in enumerate(met)}
    return sorted(latest, key=lambda token: (-met.count(token), -latest[token]))
