"""The invariant of tensor parallelism: all ranks stay in step.

That rank 0's text and law are right is the matter of every other invariant: they read rank 0's run. Ranks may agree on
a wrong text, and a right text of rank 0 may hide that another rank keeps other rows.
"""

from collections.abc import Iterator
from dataclasses import replace

from specverify.properties.verdict.finding import Comparisons, Finding
from specverify.properties.verdict.invariant import Fact, Invariant, Oracle, Unobserved, needing
from specverify.properties.verdict.subject import Subject
from specverify.reference.case import Case
from specverify.reference.parallel import PART, RankRun
from specverify.reference.trace import Stage

NAME = "lossless.ranks-agree"


def is_sharded(case: Case) -> bool:
    """Whether the target is sharded."""
    return case.ranks > 1


def ranks_agree(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Every rank emitted the tokens and accepted the lengths of rank 0, and entered the same collectives in order.

    Those of the draft's ranks alone are asked of these.
    """
    runs = subject(case).ranks
    if not runs:
        raise Unobserved("the backend does not reveal the runs of its ranks")
    first = runs[0]
    shared = replace(first, calls=tuple(call for call in first.calls if not call.startswith(PART)))
    for rank, run in enumerate(runs[1:], 1):
        # Ranks that part in their first step have no step to compare: they are compared by how far they came.
        yield Comparisons(max(1, len(first.tokens) + len(first.calls)))
        divergence = _divergence(first if rank < max(case.draft_ranks, 1) else shared, run)
        if divergence is not None:
            step, stage, side, expected, observed = divergence
            where: dict[str, int | str] = {"rank": rank, "side": side}
            yield Finding(NAME, stage, step, where, expected, observed)
            return


def _divergence(first: RankRun, run: RankRun) -> tuple[int, Stage, str, object, object] | None:
    """The step and stage in which `run` leaves rank 0's, the side, and the two values; None where they are equal."""
    for step in range(max(len(first.lengths), len(run.lengths))):
        for side in ("lengths", "tokens"):
            expected, observed = getattr(first, side)[step : step + 1], getattr(run, side)[step : step + 1]
            if expected != observed:
                # A rank without the step broke off on the way to it, and its collectives say where.
                return (
                    (step, Stage.ACCEPTED, side, expected[0], observed[0])
                    if expected and observed
                    else _calls(first, run, step)
                )
    return _calls(first, run, len(first.lengths)) if first.calls != run.calls else None


def _calls(first: RankRun, run: RankRun, step: int) -> tuple[int, Stage, str, object, object]:
    """The first collective that differs, assigned to the step that the ranks had not all done."""
    pairs = zip((*first.calls, "none"), (*run.calls, "none"), strict=False)
    expected, observed = next(
        ((first_call, second_call) for first_call, second_call in pairs if first_call != second_call),
        ("a step", "none"),
    )
    return step, Stage.ATTENDED, "collectives", expected, observed


INVARIANTS = (
    Invariant(
        NAME,
        "All ranks of a sharded target emit the same tokens, accept the same lengths and enter the same collectives.",
        # Ranks that part in their first step leave a run without any stage; their own records tell it.
        needing(),
        ranks_agree,
        is_sharded,
    ),
)
