"""Question: the facts that a draft is given at one step.

`proposes` enters the function that proposes the trees of a kind of draft under the kind's tag.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specverify.reference.architecture import Model
from specverify.reference.draft.head import Head
from specverify.reference.oracle.amplification import Change, perturb_state
from specverify.reference.oracle.evaluator import Evaluator
from specverify.reference.oracle.formulas.layer import State
from specverify.reference.oracle.parameters import load_head
from specverify.reference.oracle.sampled_step import SampledStep
from specverify.reference.trace import Array, Drafted


@dataclass(frozen=True)
class Question:
    """The facts of a step that its draft is given.

    Attributes:
        tokens: Prompt and output so far; the last one is the pending root.
        step: The number of the step.
        model: The evaluator of the draft's model; None for a draft without a model.
        sampled: The step's coins and laws.
        hidden: The target's hidden states that the draft reads, at each token but the pending root: float64
            [len(tokens) - 1, width]. None for a draft that reads none.
        target: The target, whose embedding and head a draft may share; None where nobody asks.
        dtype: The working dtype, to which the weights of target and head are rounded.
        change: The change of the weights of the asking oracle's models, and of those of a head with them
            (`perturb_weights`); None for weights as they are.
        entered: For a draft that learns from the texts of several requests, the tokens that it has learnt, in order:
            for each token the text of its request up to there. None where it learns from `tokens` alone.
    """

    tokens: tuple[int, ...]
    step: int
    model: Evaluator | None
    sampled: SampledStep
    hidden: Array | None = None
    target: Model | None = None
    dtype: str = "float64"
    change: Change | None = None
    entered: tuple[tuple[int, ...], ...] | None = None

    def weights_of(self, head: Head) -> State:
        """The weights of `head`, which has the bare root as its tree; see `specverify.reference.oracle.parameters`."""
        assert self.target is not None
        state = load_head(head, self.target, self.dtype)
        return state if self.change is None else perturb_state(state, self.change)


PROPOSALS: dict[str, Callable[[Any, Question], Drafted]] = {}
"""For each tag, the function that computes the proposal of a draft of that kind."""


def proposes(tag: str) -> Callable[[Callable[[Any, Question], Drafted]], Callable[[Any, Question], Drafted]]:
    """Enter the decorated function in PROPOSALS under this tag."""

    def enter(function: Callable[[Any, Question], Drafted]) -> Callable[[Any, Question], Drafted]:
        PROPOSALS[tag] = function
        return function

    return enter
