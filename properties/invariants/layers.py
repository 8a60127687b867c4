"""The invariant of some layers of a target: their outputs on the engine's own inputs.

Of a target that is too large for the oracle, a part is judged. The residual stream before a span of layers is taken
from the engine, the oracle runs the span alone, and the engine's stream behind it must be the same. Another part is
judged by another run.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from specverify.properties.invariants.rows import first_numbers
from specverify.properties.tolerance.bounds import UNIT
from specverify.properties.tolerance.closeness import EXACT, rms, rows_beyond
from specverify.properties.verdict.finding import Comparisons, Finding
from specverify.properties.verdict.followed import rows_shown
from specverify.properties.verdict.invariant import Fact, Invariant, NotApplicable, Oracle, Unobserved, needing
from specverify.properties.verdict.subject import Subject
from specverify.reference.case import Case
from specverify.reference.draft.layer_head import LayerHead
from specverify.reference.oracle.layer_span import SpanStep
from specverify.reference.trace import Array, Stage, Step

NAME = "layers.between-taps"

BETWEEN = {"float32": 360.0, "bfloat16": 24.0, "float16": 24.0}
"""Largest rms distance of a row behind one layer, in unit roundoffs times the row's rms; sqrt(n) times for n layers.

No control run measures this error: the bound of hidden states (`draft.hidden_states.HIDDEN`) in float32, and less than
half of it in 16 bits, where one or two layers round a row a few times.
"""


@runtime_checkable
class RunsLayers(Protocol):
    """An oracle that runs a span of layers alone."""

    def outputs(
        self, case: Case, text: Array, nodes: Sequence[Array], steps: Sequence[SpanStep]
    ) -> tuple[Array, list[Array]]:
        """See `specverify.reference.oracle.layer_span.LayerSpan.outputs`; on the target of `case`."""
        ...

    @property
    def num_layers(self) -> int:
        """The number of layers of the span."""
        ...


def between_taps(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Behind the span each row of text and trees is what the span makes of the engine's own rows before it."""
    if not isinstance(oracle, RunsLayers):
        raise NotApplicable("the oracle runs the whole target")
    steps = [step for step in subject(case).steps if step.drafted is not None]
    hidden_rows = [step.scored.hidden for step in steps if step.scored is not None and step.scored.hidden is not None]
    if not steps or len(hidden_rows) < len(steps):
        raise Unobserved("the backend does not show the hidden states of its trees")
    text, step_of_row = _text_rows(case, steps)
    # Each row holds the stream before the span and the one behind it, side by side.
    pairs = [np.split(rows, 2, axis=-1) for rows in (text, *hidden_rows)]
    spans = [
        SpanStep(len(step.context), step.drafted.tree, rows_shown(step)) for step in steps if step.drafted is not None
    ]
    true_text, true_nodes = oracle.outputs(case, pairs[0][0], [entering for entering, _ in pairs[1:]], spans)
    yield Comparisons(sum(len(entering) for entering, _ in pairs))
    # The text first: a wrong row of it makes the rows of every later tree wrong.
    wrong = _worst(case, oracle, pairs[0][1], true_text, first=True)
    if wrong is not None:
        row, measure = wrong
        yield _finding(step_of_row[row], {"position": row, "side": "text"}, true_text[row], pairs[0][1][row], measure)
        return
    for number, ((_, leaving), true) in enumerate(zip(pairs[1:], true_nodes, strict=True)):
        wrong = _worst(case, oracle, leaving, true)
        if wrong is not None:
            node, measure = wrong
            yield _finding(number, {"node": node}, true[node], leaving[node], measure)
            return


def _text_rows(case: Case, steps: Sequence[Step]) -> tuple[Array, list[int]]:
    """The engine's rows of the text by position, both taps side by side, and the step that showed each of them."""
    assert isinstance(case.draft, LayerHead)
    rows: dict[int, tuple[Array, int]] = {}
    for number, step in enumerate(steps):
        given = step.drafted.given if step.drafted is not None else None
        for place, state in enumerate(() if given is None else given.hidden, 0 if given is None else given.first):
            rows.setdefault(case.draft.position_of_state(place), (state, number))
    length = max(len(step.context) for step in steps)
    if any(position not in rows for position in range(length)):
        raise Unobserved("the backend does not show the hidden states of all rows of its text")
    return np.stack([rows[position][0] for position in range(length)]), [rows[p][1] for p in range(length)]


def _worst(
    case: Case, oracle: RunsLayers, observed: Array, true: Array, *, first: bool = False
) -> tuple[int, float] | None:
    """The row that lies farthest beyond its limit with its measure, or the `first` such row; None where none does."""
    if not len(true):
        return None
    sizes = rms(true)[:, None]
    if case.dtype == "float64":
        limits = EXACT * np.maximum(1.0, sizes)
    else:
        limits = np.sqrt(oracle.num_layers) * BETWEEN[case.dtype] * UNIT[case.dtype] * sizes
    # Rows of unit limits: each row has its own size, and a first token many times that of others.
    with np.errstate(invalid="ignore", divide="ignore"):
        beyond = [(row, measure) for (row,), measure in rows_beyond(observed / limits, true / limits, 1.0)]
    if not beyond:
        return None
    return min(beyond) if first else beyond[0]


def _finding(number: int, where: dict[str, int | str], true: Array, observed: Array, measure: float) -> Finding:
    return Finding(NAME, Stage.SCORED, number, where, first_numbers(true), first_numbers(observed), measure)


INVARIANTS = (
    Invariant(
        NAME,
        "Behind a span of layers each row is what the span makes of the engine's own row before it (`--layers`).",
        needing(Stage.DRAFTED, Stage.SCORED),
        between_taps,
        lambda case: case.draft.reads is not None and isinstance(case.draft, LayerHead),
    ),
)
