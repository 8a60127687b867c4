"""The turns of transformers' own generation in a dialogue.

Its plain generation takes the cache of the turn before. Its assisted generation, of which prompt lookup is a kind, does
not: transformers 5.23 runs the whole prompt behind the columns that the cache has, so that the text is another. So
assisted generation and prompt lookup begin every turn with an empty cache.
"""

from typing import Any

from specverify.bench.hugging_face import PLAIN, continue_turn
from specverify.bench.turn import Turn
from specverify.reference.case import Case

KEEPING = (PLAIN,)
"""Ways of transformers that go on with a cache."""


class TransformersDialogue:
    """A way of transformers through the turns of a dialogue.

    Args:
        way: The way.
    """

    def __init__(self, way: str) -> None:
        self._way = way
        self._cache: Any = None
        self._tokens: tuple[int, ...] = ()

    def turn(self, case: Case, number: int, repeat: int) -> Turn:
        """The next turn; it begins with an empty cache where its prompt does not begin with the text of the last."""
        follows = len(case.prompt) > len(self._tokens) and case.prompt[: len(self._tokens)] == self._tokens
        cache = self._cache if follows and self._way in KEEPING else None
        turn, self._cache = continue_turn(self._way, case, number, repeat, cache)
        self._tokens = case.prompt + turn.tokens
        return turn
