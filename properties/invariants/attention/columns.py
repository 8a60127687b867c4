"""The invariant of choices of columns: each row attends to those with its best index scores.

A row chooses in its attention, so that a wrong choice is a finding of that stage; traces show it beside the logits.
"""

from functools import partial

from specverify.properties.invariants.attention.best_choices import ChoiceKind, best_choices
from specverify.properties.verdict.finding import IndexingCounts
from specverify.properties.verdict.invariant import Invariant, needing
from specverify.reference.oracle.choices import COLUMNS
from specverify.reference.trace import Stage

NAME = "attention.columns-best"

INVARIANTS = (
    Invariant(
        NAME,
        "Each row attends to the columns with its best index scores, ties aside.",
        needing(Stage.DRAFTED, Stage.SCORED),
        partial(best_choices, ChoiceKind(NAME, COLUMNS, Stage.ATTENDED, IndexingCounts)),
        lambda case: case.model.indexed,
    ),
)
