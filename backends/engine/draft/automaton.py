"""The draft that continues an earlier occurrence of the end of the text, and its suffix automaton."""

from dataclasses import dataclass, field

from torch import Tensor

from specverify.backends.engine.draft.base import CachelessDraft, Opening, Proposal, opens
from specverify.backends.engine.sampling.step import StepSampling
from specverify.reference.draft.automaton import Automaton
from specverify.reference.tree import Tree


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

    It grows with its text, token by token, by the construction of Blumer et al. (1985).

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
        self._state = 0  # the state of the longest suffix that occurs earlier

    def extend(self, token: int) -> None:
        """Append `token` to the text."""
        self._follow(token)
        self.text.append(token)
        self._grow(token)

    def _follow(self, token: int) -> None:
        """Lengthen the match by `token`, in the automaton of the text before it, or fall back to a shorter suffix."""
        while self._state and token not in self.states[self._state].following:
            self._state = self.states[self._state].link
            self.match = self.states[self._state].length
        if token in self.states[self._state].following:
            self._state = self.states[self._state].following[token]
            self.match += 1
        state = self.states[self._state]
        self.first, self.latest = (state.first, state.latest) if self.match else (0, 0)

    def _grow(self, token: int) -> None:
        """Add the suffixes of the longer text to the automaton."""
        states = self.states
        end = len(self.text)
        new_state = len(states)
        state = self._last
        states.append(State(end, first=end, latest=end))
        while state >= 0 and token not in states[state].following:
            states[state].following[token] = new_state
            state = states[state].link
        if state < 0:
            states[new_state].link = 0
        else:
            states[new_state].link = self._split(state, token)
        self._last = new_state
        # Every suffix of the text ends here too.
        state_above = states[new_state].link
        while state_above > 0:
            states[state_above].latest = end
            state_above = states[state_above].link

    def _split(self, state: int, token: int) -> int:
        """The state of exactly the longest part of `state` and `token`, split off from longer parts if need be."""
        states = self.states
        longer = states[state].following[token]
        if states[longer].length == states[state].length + 1:
            return longer
        longer_state = states[longer]
        copy = len(states)
        states.append(
            State(
                states[state].length + 1,
                longer_state.link,
                dict(longer_state.following),
                longer_state.first,
                longer_state.latest,
            )
        )
        longer_state.link = copy
        while state >= 0 and states[state].following.get(token) == longer:
            states[state].following[token] = copy
            state = states[state].link
        # The match may be a part that the copy took over.
        if self._state == longer and self.match <= states[copy].length:
            self._state = copy
        return copy


class AutomatonDraft(CachelessDraft):
    """Proposes a chain of the tokens after an earlier occurrence of the longest suffix that has one.

    Attributes:
        draft: The settings.
        automaton: The suffix automaton of prompt and output.
    """

    def __init__(self, draft: Automaton) -> None:
        self.draft = draft
        self.automaton = SuffixAutomaton()

    def propose(self, tokens: list[int], chance: StepSampling | None = None, hidden: Tensor | None = None) -> Proposal:
        """Propose as many tokens of the chain as follow the occurrence in the text."""
        self.grow(tokens)
        automaton = self.automaton
        shape = self.draft.shape
        following: list[int] = []
        if automaton.match >= self.draft.least:
            begin = automaton.latest if self.draft.latest else automaton.first
            following = automaton.text[begin : begin + shape.height]
        nodes = [node for node in range(len(shape)) if shape.depth[node] <= len(following)]
        path_tokens = [tokens[-1], *following]
        return Proposal(Tree(shape.subtree(nodes).parent, tuple(path_tokens[shape.depth[node]] for node in nodes)))

    def grow(self, tokens: list[int]) -> None:
        """Append the tokens that the automaton has not seen."""
        for token in tokens[len(self.automaton.text) :]:
            self.automaton.extend(token)


@opens(Automaton.TAG)
def open_draft(opening: Opening) -> AutomatonDraft:
    """Open a draft with an empty automaton, which grows with the tokens of the request."""
    draft = opening.case.draft
    assert isinstance(draft, Automaton)
    return AutomatonDraft(draft)
