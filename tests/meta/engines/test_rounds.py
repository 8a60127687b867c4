"""Rounds of engines: those that the steps of a case do not ask for are neither run nor shown."""

import pytest
import torch

from specverify.backends.adapt.drafting import Proposal
from specverify.backends.adapt.rounds import Round, needs_round, trace_of_rounds
from specverify.reference.case import Case
from specverify.reference.sampling import Stops
from specverify.reference.tree import Tree
from tests.cases import SHORTEST

OUTPUT = (5, 6, 7, 8, 9)


def rounds_of(count: int) -> list[Round]:
    """Rounds of a chain of one drafted token each, which the target accepts."""
    chain = Tree((0, 0), (4, 5))
    return [Round(Proposal(chain), logits=torch.zeros(2, 16), path=[1], bonus=6) for _ in range(count)]


@pytest.mark.parametrize(
    ("steps", "tokens", "finish"), [(0, 5, "length"), (1, 2, None), (2, 4, None), (3, 5, "length")]
)
def test_a_trace_ends_behind_the_steps_of_its_case(steps: int, tokens: int, finish: str | None) -> None:
    case = Case(SHORTEST.model, (1, 2), stops=Stops(5), steps=steps)
    trace = trace_of_rounds(case, rounds_of(3), OUTPUT)
    assert len(trace.steps) == (steps or 3)
    assert trace.output == OUTPUT[:tokens]
    assert trace.finish == finish


@pytest.mark.parametrize(("steps", "count", "needed"), [(0, 2, True), (3, 2, True), (2, 2, False), (0, 3, False)])
def test_a_round_is_needed_until_the_steps_or_the_text_end(steps: int, count: int, needed: bool) -> None:
    case = Case(SHORTEST.model, (1, 2), stops=Stops(5), steps=steps)
    output = OUTPUT[: 2 * count]
    assert needs_round(case, rounds_of(count), output) == needed
