"""The invariants of some layers of a target: their outputs and choices on the engine's own inputs.

Of a target that is too large for the oracle, a part is judged. The residual stream before a span of layers is taken
from the engine, the oracle runs the span alone, and the engine's stream behind it must be the same. The span takes the
experts and columns that the engine shows, so that these are judged by themselves, by the span's own scores. Another
part is judged by another run.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Protocol, runtime_checkable

import numpy as np

from specverify.properties.invariants.attention.best_choices import ChoiceKind, JudgedRows, choices_of_step
from specverify.properties.invariants.rows import first_numbers
from specverify.properties.tolerance.amplification import MAX_AMPLIFICATION, ROWS
from specverify.properties.tolerance.bounds import UNIT
from specverify.properties.tolerance.closeness import EXACT, rms, rows_beyond
from specverify.properties.verdict.finding import Comparisons, Finding, IndexingCounts, RoutingCounts
from specverify.properties.verdict.followed import ROUNDOFF, rows_shown
from specverify.properties.verdict.invariant import Fact, Invariant, NotApplicable, Oracle, Unobserved, needing
from specverify.properties.verdict.subject import Subject
from specverify.reference.case import Case
from specverify.reference.draft.layer_head import LayerHead
from specverify.reference.oracle.choices import COLUMNS, EXPERTS
from specverify.reference.oracle.layer_span import SpanStep
from specverify.reference.oracle.scored_choices import ScoredChoices
from specverify.reference.trace import Array, Stage, Step

NAME = "layers.between-taps"

BETWEEN = {"float32": 360.0, "bfloat16": 24.0, "float16": 24.0}
"""Largest rms distance of a row behind one layer, in unit roundoffs times the row's rms; sqrt(n) times for n layers.

No control run measures this error: the bound of hidden states (`draft.hidden_states.HIDDEN`) in float32, and less than
half of it in 16 bits, where one or two layers round a row a few times. A row beyond it may be ROWS times as far off as
a change of all the span's weights by the unit roundoff moves it (`tolerance.amplification`): a Mixtral with random
weights in bfloat16 lay 1.04 times its bound off.
"""


@runtime_checkable
class RunsLayers(Protocol):
    """An oracle that runs a span of layers alone."""

    def outputs(
        self, case: Case, text: Array, nodes: Sequence[Array], steps: Sequence[SpanStep]
    ) -> tuple[Array, list[Array]]:
        """See `specverify.reference.oracle.layer_span.LayerSpan.outputs`; on the target of `case`."""
        ...

    def output_movements(
        self, case: Case, text: Array, nodes: Sequence[Array], steps: Sequence[SpanStep]
    ) -> tuple[Array, list[Array]]:
        """See `LayerSpan.output_movements`; on the target of `case`."""
        ...

    def span_choices(
        self, case: Case, kind: str, text: Array, entering: Array, step: SpanStep, rows: list[int]
    ) -> ScoredChoices | None:
        """See `LayerSpan.scored_choices`; on the target of `case`."""
        ...

    def span_movements(
        self, case: Case, kind: str, text: Array, nodes: Sequence[Array], steps: Sequence[SpanStep]
    ) -> list[Array] | None:
        """See `LayerSpan.score_movements`; on the target of `case`."""
        ...

    @property
    def span(self) -> range:
        """The layers of the span."""
        ...


@dataclass(frozen=True)
class _SpanRun:
    """The rows of a run before and behind a span.

    Attributes:
        text: The streams of the text, before the span and behind it: [positions, hidden] each.
        nodes: Those of the nodes of each step, [nodes, hidden] each.
        steps: The steps as the span runs them.
        numbers: The number of each of these steps in the run.
        records: What the backend shows of these steps.
        step_of_row: The number of the step that showed each row of the text.
    """

    text: tuple[Array, Array]
    nodes: list[tuple[Array, Array]]
    steps: list[SpanStep]
    numbers: list[int]
    records: list[Step]
    step_of_row: list[int]

    @property
    def entering(self) -> list[Array]:
        """The streams of the nodes of each step before the span."""
        return [before for before, _ in self.nodes]


def _span_run(case: Case, subject: Subject) -> _SpanRun:
    numbered = [(number, step) for number, step in enumerate(subject(case).steps) if step.drafted is not None]
    steps = [step for _, step in numbered]
    hidden_rows = [step.scored.hidden for step in steps if step.scored is not None and step.scored.hidden is not None]
    if not steps or len(hidden_rows) < len(steps):
        raise Unobserved("the backend does not show the hidden states of its trees")
    text, step_of_row = _text_rows(case, steps)
    # Each row holds the stream before the span and the one behind it, side by side.
    (before, behind), *nodes = [tuple(np.split(rows, 2, axis=-1)) for rows in (text, *hidden_rows)]
    spans = [
        SpanStep(len(step.context), step.drafted.tree, rows_shown(step)) for step in steps if step.drafted is not None
    ]
    pairs = [(entering, leaving) for entering, leaving in nodes]
    return _SpanRun((before, behind), pairs, spans, [number for number, _ in numbered], steps, step_of_row)


def between_taps(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Behind the span each row of text and trees is what the span makes of the engine's own rows before it."""
    if not isinstance(oracle, RunsLayers):
        raise NotApplicable("the oracle runs the whole target")
    run = _span_run(case, subject)
    true_text, true_nodes = oracle.outputs(case, run.text[0], run.entering, run.steps)
    yield Comparisons(len(true_text) + sum(map(len, true_nodes)))
    movements = cache(lambda: oracle.output_movements(case, run.text[0], run.entering, run.steps))
    # The text first: a wrong row of it makes the rows of every later tree wrong.
    wrong = _worst(case, oracle, run.text[1], true_text, lambda: movements()[0], first=True)
    if wrong is not None:
        row, measure = wrong
        where: dict[str, int | str] = {"position": row, "side": "text"}
        yield _finding(run.step_of_row[row], where, true_text[row], run.text[1][row], measure)
        return
    for place, ((_, leaving), true) in enumerate(zip(run.nodes, true_nodes, strict=True)):
        wrong = _worst(case, oracle, leaving, true, lambda place=place: movements()[1][place])
        if wrong is not None:
            node, measure = wrong
            yield _finding(run.numbers[place], {"node": node}, true[node], leaving[node], measure)
            return


def best_of_span(judged_kind: ChoiceKind, case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """In the layers of the span each row takes its best, by the span's scores on the engine's own rows before it."""
    if not isinstance(oracle, RunsLayers):
        raise NotApplicable("the oracle runs the whole target")
    kind, layers = judged_kind.kind, oracle.span
    run = _span_run(case, subject)
    looked = False
    judged: JudgedRows = {}
    movements = cache(lambda: oracle.span_movements(case, kind, run.text[0], run.entering, run.steps))

    def units(place: int) -> Array | None:
        moved = movements()
        return None if moved is None else ROUNDOFF[case.dtype] * moved[place]

    for place, (record, step, entering) in enumerate(zip(run.records, run.steps, run.entering, strict=True)):
        row_choices = step.choices.of(kind)
        if row_choices is None:
            continue
        looked = True
        scores = partial(oracle.span_choices, case, kind, run.text[0], entering, step)
        facts = (run.numbers[place], record, scores, row_choices[layers.start : layers.stop])
        yield from choices_of_step(judged_kind, case.dtype, *facts, partial(units, place), judged, layers.start)
    if not looked:
        raise Unobserved(f"the backend does not show the {kind} of its rows")


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
    case: Case,
    oracle: RunsLayers,
    observed: Array,
    true: Array,
    movement: Callable[[], Array],
    *,
    first: bool = False,
) -> tuple[int, float] | None:
    """The row that lies farthest beyond its limit with its measure, or the `first` such row; None where none does.

    `movement` says how far each row moves for a relative change of all weights; it is asked where a row lies beyond.
    """
    if not len(true):
        return None
    sizes = rms(true)[:, None]
    if case.dtype == "float64":
        limits = EXACT * np.maximum(1.0, sizes)
    else:
        limits = np.sqrt(len(oracle.span)) * BETWEEN[case.dtype] * UNIT[case.dtype] * sizes
    beyond = _rows_beyond(observed, true, limits)
    # A row far beyond is a finding, however ill-conditioned it may be.
    if case.dtype != "float64" and beyond and max(measure for _, measure in beyond) <= MAX_AMPLIFICATION:
        limits = np.maximum(limits, ROWS * UNIT[case.dtype] * movement()[:, None])
        beyond = _rows_beyond(observed, true, limits)
    if not beyond:
        return None
    return min(beyond) if first else beyond[0]


def _rows_beyond(observed: Array, true: Array, limits: Array) -> list[tuple[int, float]]:
    """The rows beyond `limits` [rows, 1] with their measures, the worst first."""
    # Rows of unit limits: each row has its own size, and a first token many times that of others.
    with np.errstate(invalid="ignore", divide="ignore"):
        return [(row, measure) for (row,), measure in rows_beyond(observed / limits, true / limits, 1.0)]


def _finding(number: int, where: dict[str, int | str], true: Array, observed: Array, measure: float) -> Finding:
    return Finding(NAME, Stage.SCORED, number, where, first_numbers(true), first_numbers(observed), measure)


NEEDS = needing(Stage.DRAFTED, Stage.SCORED)


def _reads_states(case: Case) -> bool:
    return case.draft.reads is not None and isinstance(case.draft, LayerHead)


EXPERTS_BEST, COLUMNS_BEST = "layers.experts-best", "layers.columns-best"

INVARIANTS = (
    Invariant(
        NAME,
        "Behind a span of layers each row is what the span makes of the engine's own row before it (`--layers`).",
        NEEDS,
        between_taps,
        _reads_states,
    ),
    Invariant(
        EXPERTS_BEST,
        "In a span of layers each row goes through the experts with its best scores, ties aside (`--layers`).",
        NEEDS,
        partial(best_of_span, ChoiceKind(EXPERTS_BEST, EXPERTS, Stage.SCORED, RoutingCounts)),
        lambda case: _reads_states(case) and case.model.mixes_rows,
    ),
    Invariant(
        COLUMNS_BEST,
        "In a span of layers each row attends to the columns with its best index scores, ties aside (`--layers`).",
        NEEDS,
        partial(best_of_span, ChoiceKind(COLUMNS_BEST, COLUMNS, Stage.ATTENDED, IndexingCounts)),
        lambda case: _reads_states(case) and case.model.indexed,
    ),
)
