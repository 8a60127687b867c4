"""The proposal of a trie of bounded size.

Its n-grams are listed anew from the whole texts at each step.
"""

from collections import OrderedDict

from specverify.reference.draft.trie import Trie
from specverify.reference.oracle.draft.ngram import look_up_tree
from specverify.reference.oracle.draft.question import Question, proposes
from specverify.reference.trace import Drafted

Tokens = tuple[int, ...]


def entries(text: Tokens, num_entered: int = 0) -> tuple[Tokens, ...]:
    """For each token of `text` after the first `num_entered`, the text up to there: these tokens enter one by one."""
    return tuple(text[: end + 1] for end in range(num_entered, len(text)))


@proposes(Trie.TAG)
def propose(draft: Trie, question: Question) -> Drafted:
    """The tree of a trie that the request's own text has entered, or the texts of all requests that share it."""
    entered = entries(question.tokens) if question.entered is None else question.entered
    ranked = best_first(trie_grams(entered, draft.order, draft.capacity))
    return look_up_tree(draft, question.tokens, lambda context: [gram[-1] for gram in ranked if gram[:-1] == context])


def trie_grams(
    entered: tuple[Tokens, ...], order: int, capacity: int
) -> dict[Tokens, tuple[int, tuple[int, int, int]]]:
    """The n-grams of a trie that tokens have entered (see `entries`), with their counts and moments of last use.

    A moment is the number of the entry, the length of the window's beginning before it, and the place of the use within
    the window; later moments are larger.

    >>> sorted(trie_grams(entries((1, 2, 1)), order=2, capacity=9))
    [(1,), (1, 2), (2,), (2, 1)]
    """
    count: OrderedDict[Tokens, int] = OrderedDict()  # the n-grams in the order of their last uses
    last_use: dict[Tokens, tuple[int, int, int]] = {}
    for number, text in enumerate(entered):
        for width in range(min(order, len(text)), 0, -1):
            window = text[-width:]
            count[window] = count.get(window, 0) + 1
            for size in range(width, 0, -1):
                count.setdefault(window[:size], 1)
                count.move_to_end(window[:size])
                last_use[window[:size]] = (number, -width, -size)
        while len(count) > capacity:
            count.popitem(last=False)
    return {gram: (times, last_use[gram]) for gram, times in count.items()}


def best_first(grams: dict[Tokens, tuple[int, tuple[int, int, int]]]) -> list[Tokens]:
    """The n-grams by count, then by their last use, the best first."""
    return sorted(grams, key=lambda gram: grams[gram], reverse=True)
