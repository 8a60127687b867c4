"""The matcher of a grammar that begins behind a marker, such as the end of a model's reasoning."""

import torch
from torch import Tensor

from specverify.backends.engine.guided.matcher import Matcher
from specverify.reference.grammar import Grammar


class MatcherBehindMarker(Matcher):
    """A matcher that reads tokens of any kind up to a marker, and hands those behind it to the grammar's own matcher.

    Attributes:
        markers: The sequences of token ids, the first of which a budget forces.
        budget: The most tokens before it is forced; 0 for any number.
        tokens: The tokens that were read, up to the end of the marker.
        has_begun: Whether a marker was read to its end.
        depth: The number of tokens that were pushed behind the marker and may be taken back.
    """

    def __init__(self, matcher: Matcher, grammar: Grammar) -> None:
        self._matcher = matcher
        self.markers = grammar.markers
        self.budget = grammar.budget
        self._size = len(grammar.words)
        self.tokens: list[int] = []
        self.has_begun = False
        self.depth = 0

    def legal(self) -> Tensor:
        """See `Matcher`."""
        if self.has_begun:
            return self._matcher.legal()
        forced = self.forced_token()
        if forced is None:
            return torch.ones(self._size, dtype=torch.bool)
        row = torch.zeros(self._size, dtype=torch.bool)
        row[forced] = True
        return row

    def complete(self) -> bool:
        """See `Matcher`."""
        return self._matcher.complete() if self.has_begun else self.forced_token() is None

    def push(self, token: int) -> bool:
        """See `Matcher`."""
        if self.has_begun:
            is_legal = self._matcher.push(token)
            self.depth += is_legal
            return is_legal
        if self.forced_token() not in (None, token):
            return False
        self.tokens.append(token)
        self.has_begun = self.ends_marker()
        return True

    def pop(self) -> None:
        """See `Matcher`."""
        if self.depth:
            self._matcher.pop()
            self.depth -= 1
        else:
            self.tokens.pop()
            self.has_begun = False

    def keep(self) -> None:
        """See `Matcher`."""
        if self.has_begun:
            self._matcher.keep()
            self.depth = 0

    def num_counted(self) -> int:
        """The number of tokens that count against the budget."""
        return len(self.tokens)

    def forced_token(self) -> int | None:
        """The token of the first marker that the budget forces here; None while there is room."""
        if not self.budget or self.num_counted() < self.budget:
            return None
        return self.markers[0][self.num_counted() - self.budget]

    def ends_marker(self) -> bool:
        """Whether the tokens end with a marker."""
        return any(tuple(self.tokens[-len(marker) :]) == marker for marker in self.markers)
