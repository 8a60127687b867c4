"""The continuation of the longest suffix that occurs earlier.

It is found by comparing the end of the text with every place of it, token by token.
"""

from specverify.reference.draft.automaton import Automaton
from specverify.reference.oracle.draft.question import Question, proposes
from specverify.reference.trace import Drafted
from specverify.reference.tree import Tree

Tokens = tuple[int, ...]


@proposes(Automaton.TAG)
def propose(draft: Automaton, question: Question) -> Drafted:
    """The chain of the tokens after the earlier occurrence; shorter where the text ends before the chain."""
    continued = continuation(question.tokens, draft.least, draft.latest)
    shape = draft.shape
    nodes = [node for node in range(len(shape)) if shape.depth[node] <= len(continued)]
    tokens = (question.tokens[-1], *continued)
    return Drafted(Tree(shape.subtree(nodes).parent, tuple(tokens[shape.depth[node]] for node in nodes)))


def continuation(text: Tokens, least: int, latest: bool) -> Tokens:
    """The tokens that follow the first or the last earlier occurrence of the longest repeated suffix of `text`.

    >>> continuation((1, 2, 3, 1, 2, 4, 1, 2), 1, latest=True)
    (4, 1, 2)
    """
    widths = [_shared(text, end) for end in range(len(text))]
    width = max(widths, default=0)
    if width < least:
        return ()
    ends = [end for end, shared_width in enumerate(widths) if shared_width == width]
    return text[ends[-1 if latest else 0] :]


def _shared(text: Tokens, end: int) -> int:
    """How many tokens before place `end` are those at the end of `text`."""
    count = 0
    while count < end and text[end - 1 - count] == text[-1 - count]:
        count += 1
    return count
