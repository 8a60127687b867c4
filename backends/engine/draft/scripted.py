"""A draft that proposes the trees its case drew, one per step, then the bare root."""

from backends.engine.draft.base import Proposal
from backends.engine.kv.base import KvCache
from backends.engine.sampling.step import StepSampling
from reference.tree import Tree


class ScriptedDraft:
    """Plays `trees` in order."""

    cache: KvCache | None = None
    calls = 0

    def __init__(self, trees: tuple[Tree, ...]) -> None:
        self._trees = trees
        self._at = 0

    def propose(self, tokens: list[int], chance: StepSampling | None = None) -> Proposal:
        """Return the next tree of the script with the engine's own pending token as its root."""
        tree = self._trees[self._at] if self._at < len(self._trees) else Tree((0,), (tokens[-1],))
        return Proposal(tree.rooted(tokens[-1]))

    def settle(self, kept: list[int]) -> None:
        """A script does not learn: it goes on."""
        self._at += 1

    def resume(self, cache: KvCache | None) -> None:
        """No cache was lost."""

    def abandon(self) -> None:
        """The same tree comes again."""
