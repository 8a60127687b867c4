"""Runs that several invariants ask for: which are remembered, and what stands for a run that was not made."""

from dataclasses import replace

import numpy as np
import pytest

from specverify.properties.invariants.applies import plain_decode_of
from specverify.properties.tolerance.closeness import CONTROL_TOKENS, FEWEST_CONTROL_TOKENS, noise
from specverify.properties.verdict.subject import Subject
from specverify.reference.architecture import Architecture, Rope, Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Ngram
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Stops
from specverify.reference.trace import Committed, Kv, Scored, Step, Trace
from specverify.reference.trace_memory import TraceMemory, size_of
from specverify.reference.tree import RankTree
from specverify.setup.subjects import open_planted, subject_of

MODEL = Seeded(Architecture("llama", 40, 16, 24, 2, 1, 8, (0,), Rope()), 3)
CASE = Case(MODEL, (1, 2, 3, 1, 2), Ngram(RankTree((0, 0, 0, 1), (0, 0, 1, 0)), 3), stops=Stops(20), dtype="float64")


def trace_of(numbers: int) -> Trace:
    logits = np.zeros((1, numbers))
    return Trace((Step((), scored=Scored(logits)),), (), None)


def test_what_was_not_asked_for_the_longest_is_forgotten_first() -> None:
    memory = TraceMemory[Trace](2)
    first, second, third = trace_of(1), trace_of(2), trace_of(3)
    memory.put("a", first)
    memory.put("b", second)
    assert memory.get("a") is first
    memory.put("c", third)
    assert memory.get("b") is None
    assert memory.get("a") is first


def test_bytes_bound_what_is_beside_the_latest() -> None:
    memory = TraceMemory[Trace](9, most_bytes=8 * 30)
    for name, numbers in (("a", 10), ("b", 10), ("c", 10)):
        memory.put(name, trace_of(numbers))
    assert len(memory) == 3
    memory.put("d", trace_of(100))
    assert len(memory) == 1
    memory.most_bytes = 8 * 120
    memory.put("e", trace_of(20))
    assert len(memory) == 2


def test_columns_that_two_steps_share_count_once() -> None:
    kv = Kv(np.zeros((1, 1, 4, 2)), np.zeros((1, 1, 4, 2)))
    steps = (Step((), committed=Committed(4, after=kv)), Step((), committed=Committed(4, before=kv, verified=kv)))
    assert size_of(Trace(steps, (), None)) == 2 * 4 * 2 * 8


@pytest.mark.parametrize(("steps", "output", "tokens"), [(2, (5, 6, 7), 3), (0, (5, 6, 7), 20), (2, (), 20)])
def test_plain_decode_goes_as_far_as_the_output_can_be_compared(
    steps: int, output: tuple[int, ...], tokens: int
) -> None:
    plain = plain_decode_of(replace(CASE, steps=steps), output)
    assert plain == replace(CASE.plain_decode(), stops=Stops(tokens))


def counting() -> tuple[Subject, list[Case]]:
    """A right engine, and the cases that it ran."""
    engine, ran = subject_of(open_planted("cpu-eager", None)), list[Case]()

    def run(case: Case) -> Trace:
        ran.append(case)
        return engine(case)

    return Subject("counted", run, engine.reveals), ran


@pytest.mark.parametrize(("dtype", "tokens"), [("float32", CONTROL_TOKENS), ("float64", FEWEST_CONTROL_TOKENS)])
def test_the_control_is_the_beginning_of_a_plain_decode_that_is_remembered(dtype: str, tokens: int) -> None:
    case = replace(CASE, dtype=dtype)
    alone, runs_alone = counting()
    measured = noise(case, Oracle(), alone)
    assert [run.stops.max_new_tokens for run in runs_alone] == [tokens]
    behind, runs_behind = counting()
    behind(case.plain_decode())
    again = noise(case, Oracle(), behind)
    assert runs_behind == [case.plain_decode()]
    assert (again.logits, again.measured, again.ceiling) == (measured.logits, measured.measured, measured.ceiling)
    for kind in ("attended", "measured_attended", "keys", "values"):
        assert np.array_equal(getattr(again, kind), getattr(measured, kind))
