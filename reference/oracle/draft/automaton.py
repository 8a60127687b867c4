"""The continuation of the longest suffix that occurs earlier.

It is found by comparing the end of the text with every place of it, token by token.
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
    return Drafted(Tree(shape.subtree(kept).parent, tuple(tokens[shape.depth[node]] for node in kept)))


def continuation(text: Tokens, least: int, latest: bool) -> Tokens:
    """The tokens that follow the first or the last earlier occurrence of the longest repeated suffix of `text`.

    >>> continuation((1, 2, 3, 1, 2, 4, 1, 2), 1, latest=True)
    (4, 1, 2)
    """
    widths = [_shared(text, end) for end in range(len(text))]
    width = max(widths, default=0)
    if width < least:
        return ()
    ends = [end for end, one in enumerate(widths) if one == width]
    return text[ends[-1 if latest else 0] :]


def _shared(text: Tokens, end: int) -> int:
    """How many tokens before place `end` are those at the end of `text`."""
    count = 0
    while count < end and text[end - 1 - count] == text[-1 - count]:
        count += 1
    return count
