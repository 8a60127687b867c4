"""The continuation of the longest suffix that occurs earlier.

It is found by comparing every suffix with every place of the text.
"""

from reference.draft.automaton import Automaton
from reference.oracle.draft.question import Question, means
from reference.trace import Drafted
from reference.tree import Tree

Tokens = tuple[int, ...]


@means(Automaton.TAG)
def proposed(draft: Automaton, question: Question) -> Drafted:
    """The chain of the tokens after the earlier occurrence; shorter where the text ends before the chain."""
    following = continuation(question.tokens, draft.least, draft.latest)
    shape = draft.shape
    kept = [node for node in range(len(shape)) if shape.depth[node] <= len(following)]
    tokens = (question.tokens[-1], *following)
    return Drafted(Tree(shape.part(kept).parent, tuple(tokens[shape.depth[node]] for node in kept)))


def continuation(text: Tokens, least: int, latest: bool) -> Tokens:
    """The tokens that follow the first or the last earlier occurrence of the longest repeated suffix of `text`.

    >>> continuation((1, 2, 3, 1, 2, 4, 1, 2), 1, latest=True)
    (4, 1, 2)
    """
    for width in range(len(text) - 1, least - 1, -1):
        ends = [end for end in range(width, len(text)) if text[end - width : end] == text[-width:]]
        if ends:
            return text[ends[-1 if latest else 0] :]
    return ()
