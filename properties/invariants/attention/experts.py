"""The invariant of choices of experts: each row takes those with its best scores."""

from functools import partial

from specverify.properties.invariants.attention.best_choices import ChoiceKind, best_choices
from specverify.properties.verdict.finding import RoutingCounts
from specverify.properties.verdict.invariant import Invariant, needing
from specverify.reference.oracle.choices import EXPERTS
from specverify.reference.trace import Stage

NAME = "attention.experts-best"

INVARIANTS = (
    Invariant(
        NAME,
        "Each row goes through the experts with its best scores, ties aside.",
        needing(Stage.DRAFTED, Stage.SCORED),
        partial(best_choices, ChoiceKind(NAME, EXPERTS, Stage.SCORED, RoutingCounts)),
        lambda case: case.model.mixes_rows,
    ),
)
