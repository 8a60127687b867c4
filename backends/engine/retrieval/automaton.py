"""A suffix automaton that grows with its text, token by token.

The construction is that of Blumer et al. (1985).
"""

from dataclasses import dataclass, field


@dataclass
class State:
    """The parts of a text that end at the same places.

    Attributes:
        length: The tokens of the longest part.
        link: The number of the state of its longest suffix that ends at more places; -1 for the first state.
        following: The state after each further token.
        first: The end of the first occurrence: the number of tokens before it and in it.
        latest: The same of the last occurrence.
    """

    length: int
    link: int = -1
    following: dict[int, int] = field(default_factory=dict)
    first: int = 0
    latest: int = 0


class SuffixAutomaton:
    """Every part of a text, and for the text's longest suffix that occurs earlier the place where it ended.

    Attributes:
        text: The tokens so far.
        match: The tokens of the longest suffix of `text` that occurs earlier.
        first: The end of its first occurrence; 0 where `match` is 0.
        latest: The end of its last occurrence before the end of the text.
    """

    def __init__(self) -> None:
        self.text: list[int] = []
        self.match = self.first = self.latest = 0
        self.states = [State(0)]
        self._last = 0
        self._at = 0  # the state of the longest suffix that occurs earlier

    def extend(self, token: int) -> None:
        """Append `token` to the text."""
        self._follow(token)
        self.text.append(token)
        self._grow(token)

    def _follow(self, token: int) -> None:
        """Lengthen the match by `token`, in the automaton of the text before it, or fall back to a shorter suffix."""
        while self._at and token not in self.states[self._at].following:
            self._at = self.states[self._at].link
            self.match = self.states[self._at].length
        if token in self.states[self._at].following:
            self._at = self.states[self._at].following[token]
            self.match += 1
        found = self.states[self._at]
        self.first, self.latest = (found.first, found.latest) if self.match else (0, 0)

    def _grow(self, token: int) -> None:
        """Add the suffixes of the longer text to the automaton."""
        states, end = self.states, len(self.text)
        new, at = len(states), self._last
        states.append(State(end, first=end, latest=end))
        while at >= 0 and token not in states[at].following:
            states[at].following[token] = new
            at = states[at].link
        if at < 0:
            states[new].link = 0
        else:
            states[new].link = self._split(at, token)
        self._last = new
        # Every suffix of the text ends here too.
        up = states[new].link
        while up > 0:
            states[up].latest = end
            up = states[up].link

    def _split(self, at: int, token: int) -> int:
        """The state of exactly the longest part of state `at` and `token`, split off from longer parts if need be."""
        states = self.states
        whole = states[at].following[token]
        if states[whole].length == states[at].length + 1:
            return whole
        old, copy = states[whole], len(states)
        states.append(State(states[at].length + 1, old.link, dict(old.following), old.first, old.latest))
        old.link = copy
        while at >= 0 and states[at].following.get(token) == whole:
            states[at].following[token] = copy
            at = states[at].link
        # The match may be a part that the copy took over.
        if self._at == whole and self.match <= states[copy].length:
            self._at = copy
        return copy
