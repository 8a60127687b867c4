"""Stages shown in part: what is there is judged, a wrong part is found, and no absent part is a pass."""

from dataclasses import fields, replace

import numpy as np
import pytest

from specverify.backends.admission import Misshapen, admit_trace
from specverify.backends.compositions import open_cpu
from specverify.properties.invariants.structure import INVARIANTS, MAIN
from specverify.properties.verdict.judge import judge
from specverify.properties.verdict.subject import Subject
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Stops
from specverify.reference.trace import Lowered, Trace
from specverify.reference.tree import Tree
from specverify.setup.subjects import subject_of
from tests.meta.oracle.test_draft_images import architecture

CASE = Case(Seeded(architecture(), 1), (3, 1, 4), Scripted((Tree((0, 0, 1, 0), (4, 2, 5, 7)),)), stops=Stops(4))
"""A case whose rows have positions on three axes too, so that every array of a lowered tree is there."""

ARRAYS = tuple(field.name for field in fields(Lowered))
DECLARED = open_cpu().declaration


def trace_with(names: tuple[str, ...], wrong: str = "") -> Trace:
    """Our engine's trace with these arrays of each lowered tree alone, one of them `wrong`."""
    trace = open_cpu().run(CASE)
    steps = []
    for step in trace.steps:
        assert step.lowered is not None
        arrays = {name: getattr(step.lowered, name) for name in names}
        if wrong == "visible":
            arrays[wrong] = tuple(~mask for mask in arrays[wrong])
        elif wrong == "slot":
            arrays[wrong] = arrays[wrong] * 0  # a slot further on would be one of its own too
        elif wrong:
            arrays[wrong] = arrays[wrong] + 1 if arrays[wrong].dtype != bool else ~arrays[wrong]
        steps.append(replace(step, lowered=Lowered(**arrays)))
    return admit_trace(replace(trace, steps=tuple(steps)), CASE, DECLARED)


def outcomes(trace: Trace) -> dict[str, str]:
    clean = subject_of(open_cpu())
    subject = Subject("partial", lambda case: trace, clean.reveals)
    return dict(judge(CASE, INVARIANTS, Oracle(), subject).outcomes)


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_alone_is_judged_by_what_speaks_of_it_and_the_rest_is_unobserved(name: str) -> None:
    judged = {invariant for invariant, outcome in outcomes(trace_with((name,))).items() if outcome != "unobserved"}
    assert judged == {invariant for invariant, needed in MAIN.items() if set(needed) <= {name}}


@pytest.mark.parametrize("name", ARRAYS)
def test_a_wrong_array_is_found_even_alone(name: str) -> None:
    results = outcomes(trace_with((name,), name))
    assert "failed" in results.values()
    assert "checked" not in results.values()


@pytest.mark.parametrize("name", MAIN)
def test_no_statement_passes_without_the_arrays_it_begins_with(name: str) -> None:
    other_arrays = tuple(array for array in ARRAYS if array not in MAIN[name])
    assert outcomes(trace_with(other_arrays))[name] == "unobserved"
    assert outcomes(trace_with(ARRAYS))[name] == "checked"


def test_a_lowered_stage_without_any_array_is_refused() -> None:
    with pytest.raises(Misshapen, match="lowered: every array None, expected at least one of its arrays"):
        trace_with(())


def test_a_mask_alone_has_a_row_for_each_node() -> None:
    trace = trace_with(("visible",))
    lowered = trace.steps[0].lowered
    assert lowered is not None
    assert lowered.array_names == ("visible",)
    assert lowered.rows == 4
    short = replace(lowered, visible=tuple(np.ones((2, 6), dtype=bool) for _ in lowered.visible or ()))
    with pytest.raises(Misshapen, match=r"lowered\.visible: .* a row for each of 4 nodes at least"):
        admit_trace(replace(trace, steps=(replace(trace.steps[0], lowered=short),)), CASE, DECLARED)
