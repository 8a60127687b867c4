"""The invariant of choices of experts: each row takes those with its best scores.

All other numbers are compared with the oracle's under the backend's own choices
(`specverify.properties.verdict.followed`), so that the choices need a judge of their own.
"""

from collections.abc import Iterator

import numpy as np
from scipy.special import ndtr

from specverify.properties.verdict.finding import Comparisons, Finding, RoutingCounts
from specverify.properties.verdict.followed import (
    TIE_SIGMA,
    Follows,
    can_follow,
    follow_step,
    routed_of,
    sigma,
    tie_limits,
    tie_units,
)
from specverify.properties.verdict.invariant import Fact, Invariant, NotApplicable, Oracle, Unobserved, needing
from specverify.properties.verdict.subject import Subject
from specverify.reference.case import Case
from specverify.reference.oracle.formulas.routers import UNKNOWN
from specverify.reference.trace import Array, Stage, Step

NAME = "attention.experts-best"


def experts(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """The experts of each row have its best scores, by the oracle's scores behind the choices of the other rows.

    A choice with scores inside their noise is a tie, and counted (rule T). Rows of the context are judged where they
    are shown first.
    """
    if not can_follow(case, oracle):
        raise NotApplicable("no layer has experts, or the reference cannot be told what a row takes")
    looked = False
    judged: dict[tuple[int, ...], bytes] = {}
    for number, step in enumerate(subject(case).steps):
        routed = routed_of(step)
        if routed is None or step.drafted is None:
            continue
        follower = follow_step(case, oracle, step)
        assert isinstance(follower, Follows)
        routing = follower.routing(case, step.context, step.drafted.tree)
        if routing is None:
            raise NotApplicable("the reference shows no scores of experts")
        looked = True
        if routed.shape != routing.chosen.shape:
            yield Comparisons()
            where: dict[str, int | str] = {"side": "shape"}
            yield Finding(NAME, Stage.SCORED, number, where, str(routing.chosen.shape), str(routed.shape))
            continue
        unknown = (routed == UNKNOWN).any(axis=-1)
        new_rows = [row for row, text in enumerate(_texts(step)) if judged.get(text) != routed[:, row].tobytes()]
        judged |= {text: routed[:, row].tobytes() for row, text in enumerate(_texts(step))}
        gaps = np.where(unknown, 0.0, routing.gaps(routed))
        # How far roundings move the scores of a row is asked where it took other experts alone.
        units = np.full(gaps.shape, sigma(case.dtype, len(routed)))
        limits = TIE_SIGMA * units
        movement = tie_units(case, follower, step.context, step.drafted.tree) if gaps.any() else None
        if movement is not None:
            units = np.maximum(units, movement)
            limits = tie_limits(case.dtype, movement)
        arrays = (routing.margins(), gaps, units, limits, ~unknown)
        yield from _count_choices(*(array[:, new_rows] for array in arrays))
        for layer, place in np.argwhere(~(gaps <= limits)[:, new_rows]).tolist():
            row = new_rows[place]
            context = len(step.context)
            where = {"layer": layer, **({"position": row} if row < context else {"node": row - context})}
            values = routing.chosen_by_scores(layer)[row].tolist(), routed[layer, row].tolist()
            yield Finding(NAME, Stage.SCORED, number, where, *values, float(gaps[layer, row] / limits[layer, row]))
    if not looked:
        raise Unobserved("the backend does not show the experts of its rows")


def _texts(step: Step) -> list[tuple[int, ...]]:
    """The tokens up to each row of context and tree."""
    assert step.drafted is not None
    tree = step.drafted.tree
    context = step.context
    above = [context[: row + 1] for row in range(len(context))]
    return [*above, *((*context, *tree.tokens_to(node)) for node in range(len(tree)))]


def _count_choices(margins: Array, gaps: Array, units: Array, limits: Array, is_known: Array) -> Iterator[Fact]:
    """The choices that were compared, those that are ties, and the ties that the noise of scores predicts."""
    choices = is_known & np.isfinite(margins)
    yield Comparisons(int(is_known.sum()))
    # Both scores carry noise, so their difference has a unit times sqrt(2).
    predicted = float(ndtr(-(margins / units)[choices] / np.sqrt(2)).sum())
    tied = (gaps > 0) & (gaps <= limits)
    worst = float((gaps / units)[tied].max(initial=0.0))
    yield RoutingCounts(int(choices.sum()), int((margins <= limits)[choices].sum()), predicted, int(tied.sum()), worst)


INVARIANTS = (
    Invariant(
        NAME,
        "Each row goes through the experts with its best scores, ties aside.",
        needing(Stage.DRAFTED, Stage.SCORED),
        experts,
        lambda case: case.model.mixes_rows,
    ),
)
