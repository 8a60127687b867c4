"""The question to a draft at one step, and the table of the functions that answer, by the tag of the kind."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from reference.oracle.evaluator import Evaluator
from reference.oracle.sampled_step import SampledStep
from reference.trace import Array, Drafted


@dataclass(frozen=True)
class Question:
    """The facts of a step that its draft is given.

    Attributes:
        tokens: Prompt and output so far; the last one is the pending root.
        step: The number of the step.
        model: Runs the draft's model; None for a draft that has none.
        sampled: The step's coins and laws.
        hidden: The target's hidden states that the draft reads, at each token but the pending root: float64
            [len(tokens) - 1, width]. None for a draft that reads none.
    """

    tokens: tuple[int, ...]
    step: int
    model: Evaluator | None
    sampled: SampledStep
    hidden: Array | None = None


MEANINGS: dict[str, Callable[[Any, Question], Drafted]] = {}
"""For each tag, the function that says what a draft of that kind must propose."""


def means(tag: str) -> Callable[[Callable[[Any, Question], Drafted]], Callable[[Any, Question], Drafted]]:
    """Enter the decorated function as the meaning of the drafts with this tag."""

    def enter(function: Callable[[Any, Question], Drafted]) -> Callable[[Any, Question], Drafted]:
        MEANINGS[tag] = function
        return function

    return enter
