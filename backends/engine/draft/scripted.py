"""The scripted draft, which proposes the trees of its case, one per step.

After the last tree it proposes the bare root.
"""

from torch import Tensor

from specverify.backends.engine.draft.base import Opening, Proposal, opens
from specverify.backends.engine.kv.base import KvCache
from specverify.backends.engine.sampling.step import StepSampling
from specverify.reference.draft import Scripted
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.tree import Tree


class ScriptedDraft:
    """Proposes `trees` in order, one per step, from that of number `step` on."""

    cache: KvCache | None = None
    calls = 0
    reads: HiddenStates | None = None

    def __init__(self, trees: tuple[Tree, ...], step: int = 0) -> None:
        self._trees = trees
        self._step = step

    def propose(self, tokens: list[int], chance: StepSampling | None = None, hidden: Tensor | None = None) -> Proposal:
        """Return the next tree of the script, with the engine's own pending token as its root."""
        tree = self._trees[self._step] if self._step < len(self._trees) else Tree((0,), (tokens[-1],))
        return Proposal(tree.with_root(tokens[-1]))

    def settle(self, rows: list[int]) -> None:
        """Go on to the next tree, whatever was kept."""
        self._step += 1

    def resume(self, cache: KvCache | None) -> None:
        """Do nothing: this draft has no cache."""

    def abandon(self) -> None:
        """Do nothing: the next `propose` returns the same tree."""


@opens(Scripted.TAG)
def open_draft(opening: Opening) -> ScriptedDraft:
    """Open a draft with the trees of the case."""
    assert opening.case.draft.trees is not None
    return ScriptedDraft(opening.case.draft.trees, opening.draft_steps)
