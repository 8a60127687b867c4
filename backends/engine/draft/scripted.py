"""A draft that proposes the trees its case drew, one per step, then the bare root."""

from transformers import DynamicCache

from backends.engine.draft.base import Proposal
from backends.engine.sampling.step import StepSampling
from reference.tree import Tree


class ScriptedDraft:
    """Plays `trees` in order."""

    cache: DynamicCache | None = None
    calls = 0

    def __init__(self, trees: tuple[Tree, ...]) -> None:
        self._trees = iter(trees)

    def propose(self, tokens: list[int], chance: StepSampling | None = None) -> Proposal:
        """Return the next tree of the script with the engine's own pending token as its root."""
        bare = Tree((0,), (tokens[-1],))
        return Proposal(next(self._trees, bare).rooted(tokens[-1]))

    def settle(self, kept: list[int]) -> None:
        """A script does not learn."""
