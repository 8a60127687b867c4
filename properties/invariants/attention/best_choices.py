"""Judging the choices of a backend: each row takes the experts or columns with its best scores.

All other numbers are compared with the oracle's under the backend's own choices
(`specverify.properties.verdict.followed`), so that the choices need a judge of their own.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy.special import ndtr

from specverify.properties.verdict.finding import Comparisons, Finding, IndexingCounts, Reads, RoutingCounts
from specverify.properties.verdict.followed import (
    TIE_SIGMA,
    Follows,
    can_follow,
    follow_step,
    rows_shown,
    sigma,
    tie_limits,
    tie_units,
)
from specverify.properties.verdict.invariant import Fact, NotApplicable, Oracle, Unobserved
from specverify.properties.verdict.subject import Subject
from specverify.reference.case import Case
from specverify.reference.oracle.choices import COLUMNS
from specverify.reference.oracle.formulas.routers import UNKNOWN
from specverify.reference.oracle.scored_choices import ScoredChoices
from specverify.reference.trace import Array, Stage, Step
from specverify.reference.tree import Tree

LISTED = 16
"""Most columns of a row that a finding lists."""


@dataclass(frozen=True)
class ChoiceKind:
    """A kind of choice as an invariant judges it.

    Attributes:
        invariant: The name of the invariant.
        kind: A member of `specverify.reference.oracle.choices.KINDS`.
        stage: The stage at which a row chooses.
        counts: The class of the invariant's counts.
    """

    invariant: str
    kind: str
    stage: Stage
    counts: type[RoutingCounts] | type[IndexingCounts]


def best_choices(judged_kind: ChoiceKind, case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """The choices of each row are its best, by the oracle's scores behind the choices of the other rows.

    A choice with scores inside their noise is a tie, and counted (rule T). Rows of the context are judged where they
    are shown first.
    """
    kind = judged_kind.kind
    if not can_follow(case, oracle):
        raise NotApplicable(f"no layer chooses {kind}, or the reference cannot be told what a row takes")
    looked = False
    judged: JudgedRows = {}
    for number, step in enumerate(subject(case).steps):
        row_choices = rows_shown(step).of(kind)
        if row_choices is None or step.drafted is None:
            continue
        follower = follow_step(case, oracle, step)
        assert isinstance(follower, Follows)
        looked = True
        scores = partial(follower.scored_choices, kind, case, step.context, step.drafted.tree)
        units = partial(tie_units, kind, case, follower, step.context, step.drafted.tree)
        reads = partial(_choice_reads, kind, case, step, row_choices)
        yield from choices_of_step(
            judged_kind, case.dtype, number, step, scores, row_choices, units, judged, reads_of=reads
        )
    if not looked:
        raise Unobserved(f"the backend does not show the {kind} of its rows")


def _choice_reads(kind: str, case: Case, step: Step, row_choices: Array, layer: int, row: int, limit: float) -> Reads:
    """Reads of the gap between what `row` takes in `layer` and its best choice.

    Rows above whose choices are not shown, as those of a prompt that another server filled in, may have taken others at
    a tie, and the gap then moves.
    """
    assert step.drafted is not None
    context, tree = step.context, step.drafted.tree
    if row < len(context):
        context, tree, node = context[:row], Tree((0,), (context[row],)), 0
    else:
        node = row - len(context)
    place = len(context) + node

    def gap(oracle: object) -> Array | None:
        if not isinstance(oracle, Follows):
            return None
        scored = oracle.scored_choices(kind, case, context, tree, [place])
        return None if scored is None else np.asarray(scored.gaps(row_choices[:, [row]])[layer])

    # A row chooses its experts behind the columns to which it attends in the same layer.
    return Reads(case, context, tree, node, layer, limit, gap, attends=kind != COLUMNS)


JudgedRows = dict[tuple[int, ...], bytes]
"""The choices of the rows that were judged, by the tokens up to each row."""


def choices_of_step(
    judged_kind: ChoiceKind,
    dtype: str,
    number: int,
    step: Step,
    scores: Callable[[list[int]], ScoredChoices | None],
    row_choices: Array,
    movement: Callable[[], Array | None],
    judged: JudgedRows,
    first_layer: int = 0,
    reads_of: Callable[[int, int, float], Reads] | None = None,
) -> Iterator[Fact]:
    """The choices of one step's rows against their scores; rows that were judged before are left out, and added.

    Args:
        judged_kind: The kind of choice.
        dtype: The working dtype.
        number: The number of the step.
        step: The step.
        scores: The reference's scores of the rows of the given numbers.
        row_choices: The backend's choices, [layers, context + nodes, taken].
        movement: How far roundings move the scores of each row, as `tie_units`; it is asked where a row made another
            choice alone.
        judged: The rows of earlier steps.
        first_layer: The number of the first layer of `scores` and `row_choices`.
        reads_of: What the gap of a row reads, from its layer, the row and the gap's limit; None where nobody asks.

    Raises:
        NotApplicable: The reference shows no scores.
    """
    name, kind, stage = judged_kind.invariant, judged_kind.kind, judged_kind.stage
    texts = _texts(step)
    has_rows = row_choices.ndim == 3 and row_choices.shape[1] == len(texts)
    contents = [_content(row_choices[:, row]) for row in range(len(texts))] if has_rows else []
    # Of another number of rows each is scored, for the shape that they must have.
    new_rows = [row for row, text in enumerate(texts) if not has_rows or judged.get(text) != contents[row]]
    if not new_rows:
        yield Comparisons()
        return
    scored = scores(new_rows)
    if scored is None:
        raise NotApplicable(f"the reference shows no scores of {kind}")
    if not has_rows or not scored.fits(row_choices[:, new_rows]):
        yield Comparisons()
        layers, _, taken = scored.chosen.shape
        where: dict[str, int | str] = {"side": "shape"}
        yield Finding(name, stage, number, where, str((layers, len(texts), taken)), str(row_choices.shape))
        return
    judged |= dict(zip(texts, contents, strict=True))
    chosen = row_choices[:, new_rows]
    is_known = is_known_choice(kind, chosen)
    gaps = np.where(is_known, scored.gaps(chosen), 0.0)
    units = np.full(gaps.shape, sigma(dtype, len(chosen)))
    limits = TIE_SIGMA * units
    moved = movement() if gaps.any() else None
    if moved is not None:
        units = np.maximum(units, moved[:, new_rows])
        limits = tie_limits(dtype, moved[:, new_rows])
    yield from _count_choices(judged_kind, scored.margins(), gaps, units, limits, is_known)
    for layer, place in np.argwhere(~(gaps <= limits)).tolist():
        row, context = new_rows[place], len(step.context)
        where = {
            "layer": first_layer + layer,
            **({"position": row} if row < context else {"node": row - context}),
        }
        values = _told_apart(kind, scored.chosen_by_scores(layer)[place], chosen[layer, place])
        # No change of scores makes a choice of too few columns the best.
        measure = float(gaps[layer, place] / limits[layer, place]) if np.isfinite(gaps[layer, place]) else None
        reads = reads_of(layer, row, float(limits[layer, place])) if reads_of is not None else None
        yield Finding(name, stage, number, where, *values, measure, reads=reads)


def is_known_choice(kind: str, chosen: Array) -> Array:
    """Whether `chosen` [layers, rows, taken] says what a row takes; columns may leave places to spare."""
    is_set = chosen != UNKNOWN
    known: Array = is_set.any(axis=-1) if kind == COLUMNS else is_set.all(axis=-1)
    return known


def _told_apart(kind: str, expected: Array, observed: Array) -> tuple[list[int], list[int]]:
    """The choices of a row as a page shows them; of more columns than LISTED, those that differ."""
    expected, observed = expected[expected != UNKNOWN], observed[observed != UNKNOWN]
    if kind == COLUMNS and len(expected) > LISTED:
        return np.setdiff1d(expected, observed).tolist(), np.setdiff1d(observed, expected).tolist()
    return expected.tolist(), observed.tolist()


def _content(row: Array) -> bytes:
    """The choices of one row in all layers, [layers, taken], without places that no layer fills."""
    return np.ascontiguousarray(row[:, (row != UNKNOWN).any(axis=0)]).tobytes()


def _texts(step: Step) -> list[tuple[int, ...]]:
    """The tokens up to each row of context and tree."""
    assert step.drafted is not None
    tree = step.drafted.tree
    context = step.context
    above = [context[: row + 1] for row in range(len(context))]
    return [*above, *((*context, *tree.tokens_to(node)) for node in range(len(tree)))]


def _count_choices(
    judged_kind: ChoiceKind, margins: Array, gaps: Array, units: Array, limits: Array, is_known: Array
) -> Iterator[Fact]:
    """The choices that were compared, those that are ties, and the ties that the noise of scores predicts."""
    # Equal scores hide which of the two was taken: such a row is no tie, and predicts none.
    choices = is_known & np.isfinite(margins) & (margins > 0)
    yield Comparisons(int(is_known.sum()))
    # Both scores carry noise, so their difference has a unit times sqrt(2).
    predicted = float(ndtr(-(margins / units)[choices] / np.sqrt(2)).sum())
    tied = (gaps > 0) & (gaps <= limits)
    worst = float((gaps / units)[tied].max(initial=0.0))
    near = int((margins <= limits)[choices].sum())
    yield judged_kind.counts(int(choices.sum()), near, predicted, int(tied.sum()), worst)
