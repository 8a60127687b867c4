"""Positions on three axes, of rows and of the columns before them, are judged where trees are lowered."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from specverify.backends.compositions import open_cpu
from specverify.properties.invariants import ALL
from specverify.properties.verdict.finding import Verdict
from specverify.properties.verdict.judge import judge
from specverify.properties.verdict.subject import Subject
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Ngram, Scripted
from specverify.reference.images import Image
from specverify.reference.layout import KvLayout
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.trace import UNKNOWN_POSITION, Array, Stage, Trace
from specverify.reference.tree import RankTree
from specverify.setup.subjects import subject_of
from tests.meta.oracle.test_draft_images import architecture
from tests.models import LLAMA

NAME = "structure.positions-on-axes"
AXES = tuple(invariant for invariant in ALL if invariant.name == NAME)
TREE = RankTree((0, 0, 1, 0), (0, 0, 0, 1))
PROMPT = (1, 2, 3, 4, 9, 8, 7, 1, 0, 6, 3, 2)
CASE = Case(
    Seeded(architecture(), 1, images=(Image(1, 1, 2, 3),)), PROMPT, Ngram(TREE), KvLayout(prefill_chunk=3),
    stops=Stops(6), dtype="float64",
)  # fmt: skip


def changed(trace: Trace, change: Callable[[Array], Array | None], step: int) -> Trace:
    """`trace` with other positions on axes in one step."""
    steps = list(trace.steps)
    lowered = steps[step].lowered
    assert lowered is not None
    assert lowered.axes is not None
    steps[step] = replace(steps[step], lowered=replace(lowered, axes=change(lowered.axes.copy())))
    return replace(trace, steps=tuple(steps))


def verdict_of(change: Callable[[Array], Array | None], step: int = 0) -> Verdict:
    run = open_cpu().run
    return judge(
        CASE, AXES, Oracle(), Subject("recorded", lambda case: changed(run(case), change, step), frozenset(Stage))
    )


def with_entry(axis: int, column: int, value: int) -> Callable[[Array], Array]:
    def change(axes: Array) -> Array:
        axes[axis, column] = value
        return axes

    return change


@pytest.mark.parametrize(
    ("axis", "column", "step", "where"),
    [
        (1, 5, 0, {"column": 5, "position": 5}),
        (2, 12, 1, {"column": 12, "node": 0}),
        (0, 11, 1, {"column": 11, "position": 11}),
    ],
    ids=["of an image's token", "of a row", "of a column that an earlier tree wrote"],
)
def test_one_wrong_number_is_named(axis: int, column: int, step: int, where: dict[str, int]) -> None:
    (finding,) = verdict_of(with_entry(axis, column, 77), step).findings
    assert (finding.invariant, finding.stage, finding.step) == (NAME, Stage.LOWERED, step)
    assert finding.where == where
    assert isinstance(finding.observed, list)
    assert finding.observed[axis] == 77


def test_columns_of_an_unknown_row_are_left_out_and_missing_ones_are_not() -> None:
    def unknown(axes: Array) -> Array:
        axes[:, 5] = UNKNOWN_POSITION
        return axes

    assert verdict_of(unknown).findings == ()
    (finding,) = verdict_of(lambda axes: axes[:, :5]).findings
    assert finding.observed == "5 columns"


def test_an_engine_that_shows_no_axes_is_not_judged_and_a_target_of_one_axis_has_none() -> None:
    assert verdict_of(lambda axes: None).outcomes[NAME] == "unobserved"
    plain = replace(CASE, model=LLAMA, prompt=(1, 2, 3))
    assert judge(plain, AXES, Oracle(), subject_of(open_cpu())).outcomes[NAME] == "not_applicable"


def test_positions_go_along_with_pages_forks_and_hand_overs() -> None:
    images = CASE.model.images
    mates = (
        Mate(PROMPT, Scripted(), Sampling(), Stops(4), images=images),
        Mate((5,), Scripted(), Sampling(), Stops(4), images=images),
    )
    actions = [Action("add", (0,)), Action("step", (0,)), Action("fork", (0, 2)), Action("hand-over", (0,))]
    actions += [Action("step", (0, 2)), Action("evict", (0,)), Action("restore", (0,)), Action("add", (1,))]
    actions += [Action("step", (0, 1, 2))] * 3
    case = replace(
        CASE, layout=KvLayout(kind="prefix", page_size=2), dtype="float32", session=Session(mates, tuple(actions))
    )
    trace = open_cpu().run(case)
    assert trace.shared is not None
    shown = [step.lowered.axes for run in trace.shared.requests if run for step in run.steps if step.lowered]
    assert all(axes is not None and not np.any(axes == UNKNOWN_POSITION) for axes in shown)
    verdict = judge(case, AXES, Oracle(), subject_of(open_cpu()))
    assert (verdict.findings, verdict.outcomes[NAME]) == ((), "checked")
