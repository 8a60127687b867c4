"""The two sides of an audit: a recorded run, and an oracle without a model.

A recorded run answers for its own case alone. Where no checkpoint is known, the oracle lowers trees and computes
nothing: an invariant that asks it for numbers has nothing to say.
"""

from collections.abc import Iterator
from typing import Any

from specverify.properties.verdict.finding import Comparisons, Finding
from specverify.properties.verdict.invariant import Fact, Invariant, NoReference, Oracle, Unobserved, needing
from specverify.properties.verdict.judge import revealed_by
from specverify.properties.verdict.subject import NoTrace, Refusal, Subject
from specverify.reference.architecture import Architecture
from specverify.reference.case import Case
from specverify.reference.oracle.lowering import lower
from specverify.reference.trace import Drafted, Lowered, Stage, Step, Trace
from specverify.reference.tree import Tree

MODELLED = ("attended", "scored", "accepted", "emitted", "committed")
"""The stages of a step that only a model can give."""


MOST_ANSWERS = 10**6
"""The answers that a recorded run remembers: more than are asked for, since its one trace must not be forgotten."""


class RecordedRun(Subject):
    """One recorded run as a backend that has run its own case, and takes no other.

    Attributes:
        asked_again: Whether an invariant asked for another run than the recorded one.
    """

    def __init__(self, name: str, case: Case, trace: Trace, takes_tape: bool, of_request: bool) -> None:
        super().__init__(name, self._decline, revealed_by(trace), MOST_ANSWERS, takes_tape=takes_tape)
        self.asked_again = False
        # A request tells no draft: its trees are the run's own, of which the roots alone can be compared.
        self.retold = self.roots_alone = of_request
        self.remember(case, trace)

    def __call__(self, case: Case) -> Trace:
        """The recorded trace; NoTrace for every other case."""
        try:
            return super().__call__(case)
        except NoTrace:
            self.asked_again = True
            raise

    def run_again(self, case: Case, time: int = 1) -> Trace:
        """NoTrace, whatever the case: nobody runs it again."""
        self.asked_again = True
        return super().run_again(case, time)

    def _decline(self, case: Case) -> Refusal:
        return Refusal("a recorded trace is one run: this other run was not recorded")


class LoweredStep(Step):
    """A step of an oracle without a model: its tree, lowered.

    Reading a stage of MODELLED raises NoReference, so that the invariant which reads it has nothing to say.
    """

    def __init__(self, case: Case, tree: Tree, lowered: Lowered, asked_stages: set[str]) -> None:
        super().__init__(case.prefix, Drafted(tree), lowered)
        object.__setattr__(self, "asked_stages", asked_stages)  # the class is frozen

    def __getattribute__(self, name: str) -> Any:
        if name in MODELLED:
            super().__getattribute__("asked_stages").add(name)
            raise NoReference("no model is known")
        return super().__getattribute__(name)


class WithoutModel:
    """The oracle of a run whose model nobody names.

    Attributes:
        asked_stages: The stages of MODELLED for which invariants asked.
    """

    def __init__(self, architecture: Architecture) -> None:
        self._architecture = architecture
        self.asked_stages: set[str] = set()

    def __call__(self, case: Case) -> Trace:
        """The tree of a case of one step, lowered; no steps for any other case."""
        trees = case.draft.trees
        if case.steps != 1 or not trees:
            return Trace((), (), None)
        lowered = lower(trees[0], len(case.prefix), self._architecture, case.model.images)
        return Trace((LoweredStep(case, trees[0], lowered, self.asked_stages),), (), None)


def continues(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Each step begins where the step before ended: its context is the prompt and all tokens so far, but the last."""
    tokens: tuple[int, ...] = case.prompt
    for number, step in enumerate(subject(case).steps):
        yield Comparisons(len(tokens))
        if step.context != tokens[:-1]:
            differences = (
                position
                for position, pair in enumerate(zip(step.context, tokens[:-1], strict=False))
                if pair[0] != pair[1]
            )
            first_difference = next(differences, min(len(step.context), len(tokens) - 1))
            where: dict[str, int | str] = {"position": first_difference, "side": "context"}
            finding = Finding(
                "trace.continues",
                Stage.DRAFTED,
                number,
                where,
                tokens[:-1][first_difference:],
                step.context[first_difference:],
            )
            yield finding
            return
        if step.emitted is None:
            raise Unobserved("a step does not say what it emitted")
        tokens += step.emitted.tokens


CONTINUES = Invariant(
    "trace.continues",
    "Each step begins with the prompt and all tokens emitted before it, but the last.",
    needing(Stage.EMITTED),
    continues,
)
"""Of recorded traces alone: a context that a file gives is a claim, which nothing else compares without a model."""
