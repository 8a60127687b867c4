"""Differences at ties between experts that are not shown: excused by what the oracle moves, and no further."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from specverify.properties.invariants import ALL
from specverify.properties.shortfall import shortfalls
from specverify.properties.tally import Tally
from specverify.properties.verdict.finding import RoutingTie, Verdict
from specverify.properties.verdict.followed import tie_limits, tie_units
from specverify.properties.verdict.judge import judge
from specverify.properties.verdict.subject import Subject
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.oracle.choices import EXPERTS, Choices, RowChoices
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Stops
from specverify.reference.trace import Stage, Step, Trace
from specverify.reference.tree import Tree
from tests.drawn_families import listed_architectures

EXACT = tuple(invariant for invariant in ALL if invariant.name == "attention.context-exact")
ORACLE = Oracle()
TREE = Tree((0, 0, 0, 1), (5, 7, 3, 2))


@cache
def exchanged_run() -> tuple[Case, Trace, float]:
    """A case with a tie at its root, the oracle's run with the tied experts exchanged, and the move of the root."""
    for seed in range(60):
        model = Seeded(listed_architectures("mixtral")[0], seed)
        case = Case(model, (1, 2, 3, 4, 5), Scripted((TREE,)), stops=Stops(4), dtype="bfloat16", steps=1)
        (step,) = ORACLE(case).steps
        assert step.drafted is not None
        routing = ORACLE.scored_choices(EXPERTS, case, step.context, TREE)
        units = tie_units(EXPERTS, case, ORACLE, step.context, TREE)
        assert routing is not None
        assert units is not None
        limits, row = tie_limits(case.dtype, units), len(step.context)
        for layer, router in enumerate(routing.scorers):
            assert router is not None
            for _, experts in router.exchanges(row, float(limits[layer, row]))[:1]:
                chosen = routing.chosen.copy()
                chosen[layer, row] = experts
                choices = Choices(len(chosen))
                choices.add(step.context, TREE, RowChoices(chosen))
                run = ORACLE.following(case, choices)(case)
                if (verdict := verdict_of(case, run)).routing_ties and not verdict.findings:
                    return case, run, move_of(run.steps[0], step)
    raise AssertionError("no drawn model has a tie at its root that moves its logits")


def move_of(step: Step, other_step: Step) -> float:
    """The rms distance of the logits of the roots of two steps."""
    assert step.scored is not None
    assert other_step.scored is not None
    return float(np.sqrt(np.mean(np.square(step.scored.logits[0] - other_step.scored.logits[0]))))


def verdict_of(case: Case, run: Trace, reveals: frozenset[Stage] = frozenset(Stage)) -> Verdict:
    """The verdict on an engine whose run of `case` is `run`, and whose other runs are the oracle's."""
    subject = Subject("recorded", lambda asked_case: run if asked_case == case else ORACLE(asked_case), reveals)
    return judge(case, EXACT, ORACLE, subject)


def with_step(run: Trace, change: Callable[[Step], Step]) -> Trace:
    return replace(run, steps=tuple(map(change, run.steps)))


def scored_alone(step: Step) -> Step:
    return replace(step, attended=None, committed=None)


def test_tied_experts_excuse_the_move_that_they_make() -> None:
    case, run, _ = exchanged_run()
    verdict = verdict_of(case, run)
    assert verdict.findings == ()
    assert verdict.routing_ties
    for tie in verdict.routing_ties:
        assert tie.row <= len(case.prefix)
        assert 0 < tie.needed <= tie.granted


@pytest.mark.parametrize("factor", [3.0, 1e3])
def test_they_excuse_no_more(factor: float) -> None:
    """The same run with its logits further off than all ties together move them."""
    case, run, move = exchanged_run()

    def further(step: Step) -> Step:
        assert step.scored is not None
        signs = np.where(np.arange(step.scored.logits.shape[1]) % 2, 1.0, -1.0)
        granted = max(tie.granted for tie in verdict_of(case, run).routing_ties)
        logits = step.scored.logits + factor * (granted + move) * signs
        return replace(step, scored=replace(step.scored, logits=logits))

    verdict = verdict_of(case, with_step(run, further))
    assert {finding.stage for finding in verdict.findings} == {Stage.SCORED}
    assert verdict.outcomes == {"attention.context-exact": "failed"}


def test_a_fault_of_the_first_layer_is_excused_by_no_tie() -> None:
    case, run, _ = exchanged_run()

    def off(step: Step) -> Step:
        assert step.attended is not None
        output = step.attended.output.copy()
        output[0] *= 1.5
        return replace(step, attended=replace(step.attended, output=output))

    first = verdict_of(case, with_step(run, off)).first
    assert first is not None
    assert (first.stage, first.where["layer"]) == (Stage.ATTENDED, 0)


def test_without_a_row_that_has_no_tie_nothing_was_checked() -> None:
    case, run, _ = exchanged_run()
    verdict = verdict_of(case, with_step(run, scored_alone), frozenset({Stage.DRAFTED, Stage.SCORED}))
    assert verdict.findings == ()
    assert verdict.routing_ties
    assert verdict.outcomes == {"attention.context-exact": "unobserved"}


def test_experts_that_are_shown_leave_nothing_to_excuse() -> None:
    """The run is the one that ties excuse above; the experts that it shows are the oracle's own."""
    case, run, _ = exchanged_run()
    (step,) = ORACLE(case).steps
    routing = ORACLE.scored_choices(EXPERTS, case, step.context, TREE)
    assert routing is not None

    def with_experts(step: Step) -> Step:
        assert step.scored is not None
        assert routing is not None
        return replace(step, scored=replace(step.scored, routed=routing.chosen))

    verdict = verdict_of(case, with_step(run, with_experts))
    assert verdict.routing_ties == ()
    assert verdict.findings


def test_a_run_that_agrees_through_excuses_alone_is_no_pass() -> None:
    case, run, _ = exchanged_run()
    tally = Tally("own", opened=True, wanted=2)
    tally.add(verdict_of(case, run))
    tally.add(verdict_of(case, with_step(run, scored_alone), frozenset({Stage.DRAFTED, Stage.SCORED})))
    message = "attention.context-exact: ties between experts explain a difference in every case, and no case agrees"
    assert any(line.startswith(message) and "Scored.routed" in line for line in shortfalls(tally))
    tally.wanted = 3
    tally.add(verdict_of(case, ORACLE(case)))
    assert not any("ties between experts" in line for line in shortfalls(tally))


def test_a_tie_says_what_it_needed_and_what_it_was_granted() -> None:
    case, run, _ = exchanged_run()
    tie = verdict_of(case, run).routing_ties[0]
    assert isinstance(tie, RoutingTie)
    assert tie.gap_sigma >= 0
