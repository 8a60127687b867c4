"""The draft that continues an earlier occurrence of the end of the text."""

from torch import Tensor

from specverify.backends.engine.draft.base import Opening, Proposal, opens
from specverify.backends.engine.retrieval.automaton import SuffixAutomaton
from specverify.backends.engine.retrieval.looked_up import LookupDraft
from specverify.backends.engine.sampling.step import StepSampling
from specverify.reference.draft.automaton import Automaton
from specverify.reference.tree import Tree


class AutomatonDraft(LookupDraft):
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
