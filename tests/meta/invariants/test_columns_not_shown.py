"""Differences at ties between columns that are not shown: excused by what the oracle moves, and no further."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from specverify.backends.compositions import open_cpu
from specverify.properties.invariants import ALL
from specverify.properties.shortfall import shortfalls
from specverify.properties.strategies.models import GALLERY
from specverify.properties.tally import Tally
from specverify.properties.verdict.finding import Verdict
from specverify.properties.verdict.followed import tie_limits, tie_units
from specverify.properties.verdict.judge import judge
from specverify.properties.verdict.subject import Subject
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.oracle.choices import COLUMNS, Choices, RowChoices
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.oracle.formulas.routers import UNKNOWN
from specverify.reference.sampling import Stops
from specverify.reference.trace import Stage, Step, Trace
from specverify.reference.tree import Tree

EXACT = tuple(invariant for invariant in ALL if invariant.name == "attention.context-exact")
ORACLE = Oracle()
TREE = Tree((0, 0, 0, 1), (5, 7, 3, 2))
DENSE = next(arch for arch in GALLERY if arch.words.indexed and not arch.mixes_rows)


def case_of(seed: int, dtype: str = "bfloat16") -> Case:
    return Case(Seeded(DENSE, seed), (1, 2, 3, 4, 9, 8, 5), Scripted((TREE,)), stops=Stops(4), dtype=dtype, steps=1)


@cache
def exchanged(layer: int) -> tuple[Case, Trace]:
    """A case whose root has a tie in `layer`, and the oracle's run with the tied columns exchanged."""
    for seed in range(60):
        case = case_of(seed)
        (step,) = ORACLE(case).steps
        scored = ORACLE.scored_choices(COLUMNS, case, step.context, TREE)
        units = tie_units(COLUMNS, case, ORACLE, step.context, TREE)
        assert scored is not None
        assert units is not None
        scorer, row = scored.scorers[layer], len(step.context)
        assert scorer is not None
        for _, columns in scorer.exchanges(row, float(tie_limits(case.dtype, units)[layer, row]))[:1]:
            chosen = np.full_like(scored.chosen, UNKNOWN)
            chosen[layer, row, : len(columns)] = columns
            choices = Choices(len(chosen))
            choices.add(step.context, TREE, RowChoices(columns=chosen))
            run = ORACLE.following(case, choices)(case)
            if verdict_of(case, run).routing_ties:
                return case, run
    raise AssertionError("no drawn model has a tie at its root that moves its numbers")


def verdict_of(case: Case, run: Trace, reveals: frozenset[Stage] = frozenset(Stage)) -> Verdict:
    """The verdict on an engine whose run of `case` is `run`, and whose other runs are the oracle's."""
    subject = Subject("recorded", lambda asked_case: run if asked_case == case else ORACLE(asked_case), reveals)
    return judge(case, EXACT, ORACLE, subject)


@pytest.mark.parametrize("layer", range(DENSE.layers))
def test_tied_columns_excuse_the_move_that_they_make(layer: int) -> None:
    """The attention of a layer reads the columns that are chosen there, and those of the layers above."""
    case, run = exchanged(layer)
    verdict = verdict_of(case, run)
    assert verdict.findings == ()
    assert {tie.kind for tie in verdict.routing_ties} == {COLUMNS}
    for tie in verdict.routing_ties:
        assert tie.layer <= layer
        assert 0 < tie.needed <= tie.granted


@pytest.mark.parametrize("factor", [3.0, 1e3])
def test_they_excuse_no_more(factor: float) -> None:
    """The same run with its logits further off than all ties together move them."""
    case, run = exchanged(0)
    (step,), (own_step,) = run.steps, ORACLE(case).steps
    assert step.scored is not None
    assert own_step.scored is not None
    move = float(np.sqrt(np.mean(np.square(step.scored.logits[0] - own_step.scored.logits[0]))))
    granted = max(tie.granted for tie in verdict_of(case, run).routing_ties)
    signs = np.where(np.arange(step.scored.logits.shape[1]) % 2, 1.0, -1.0)
    logits = step.scored.logits + factor * (granted + move) * signs
    further = replace(run, steps=(replace(step, scored=replace(step.scored, logits=logits)),))
    verdict = verdict_of(case, further)
    assert {finding.stage for finding in verdict.findings} == {Stage.SCORED}
    assert verdict.outcomes == {"attention.context-exact": "failed"}


def test_columns_that_are_shown_leave_nothing_to_excuse() -> None:
    """The run is the one that ties excuse above; the columns that it shows are the oracle's own."""
    case, run = exchanged(0)
    (step,) = run.steps
    own_choices = ORACLE.scored_choices(COLUMNS, case, step.context, TREE)
    assert own_choices is not None
    assert step.scored is not None
    shown_run = replace(run, steps=(replace(step, scored=replace(step.scored, indexed=own_choices.chosen)),))
    verdict = verdict_of(case, shown_run)
    assert verdict.routing_ties == ()
    assert verdict.findings


def hidden(step: Step) -> Step:
    return step if step.scored is None else replace(step, scored=replace(step.scored, indexed=None))


def test_the_engine_agrees_in_float32_though_it_shows_no_columns() -> None:
    backend = open_cpu()

    def run(case: Case) -> Trace:
        trace = backend.run(case)
        return replace(trace, steps=tuple(map(hidden, trace.steps)))

    subject = Subject("silent", run, frozenset(Stage))
    for seed in range(3):
        verdict = judge(case_of(seed, "float32"), EXACT, ORACLE, subject)
        assert (verdict.findings, verdict.routing_ties) == ((), ())


def test_a_run_that_agrees_through_excuses_alone_is_told_what_to_show() -> None:
    case, run = exchanged(0)
    tally = Tally("own", opened=True, wanted=2)
    bare = replace(run, steps=tuple(replace(step, attended=None, committed=None) for step in run.steps))
    for _ in range(2):
        tally.add(verdict_of(case, bare, frozenset({Stage.DRAFTED, Stage.SCORED})))
    message = "attention.context-exact: ties between columns explain a difference in every case, and no case agrees"
    (line,) = (line for line in shortfalls(tally) if line.startswith(message))
    assert line.endswith("show the columns of each row (`Scored.indexed`), or run in float32")
