"""The scripted draft, which proposes the trees of its case, one per step.

After the last tree it proposes the bare root.
"""

from torch import Tensor

from specverify.backends.engine.draft.base import CachelessDraft, Opening, Proposal, opens
from specverify.backends.engine.sampling.step import StepSampling
from specverify.reference.draft import Scripted
from specverify.reference.tree import Tree


class ScriptedDraft(CachelessDraft):
    """Proposes `trees` in order, one per step, from that of number `step` on."""

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


@opens(Scripted.TAG)
def open_draft(opening: Opening) -> ScriptedDraft:
    """Open a draft with the trees of the case."""
    assert opening.case.draft.trees is not None
    return ScriptedDraft(opening.case.draft.trees, opening.draft_steps)
