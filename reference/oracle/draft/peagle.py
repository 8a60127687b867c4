"""The formulas of a P-EAGLE head (arXiv 2602.01469): EAGLE-3, and rows of mask tokens behind the root."""

import numpy as np

from specverify.reference.draft.peagle import MASK_STATE, PEagle
from specverify.reference.oracle.draft.eagle3 import Eagle3Formulas
from specverify.reference.oracle.draft.head import Past, propose_by_paths
from specverify.reference.oracle.draft.question import Question, proposes
from specverify.reference.trace import Array, Drafted


class ScoresOfMasks:
    """The scores of the root's row and of the rows of mask tokens: those of a path depend on its length alone."""

    def __init__(self, draft: PEagle, head: Eagle3Formulas, above: Past) -> None:
        states = head.target_states(np.tile(head.state[MASK_STATE], (draft.mask_slots, 1)))
        masks = head.extend(above, (draft.mask_token,) * draft.mask_slots, states)
        self._rows = [head.score(output) for output in (above.output, *masks.outputs)]

    def __call__(self, paths: list[tuple[int, ...]]) -> Array:
        """The scores behind each of `paths`, [paths, draft vocabulary]."""
        return np.stack([self._rows[len(path)] for path in paths])


@proposes(PEagle.TAG)
def propose(draft: PEagle, question: Question) -> Drafted:
    """The tree of a P-EAGLE head on the oracle's hidden states."""
    head = Eagle3Formulas(draft, question)
    return propose_by_paths(head, question, lambda above: ScoresOfMasks(draft, head, above))
