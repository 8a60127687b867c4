"""Backends known to be wrong, for tests of invariants: an engine with a fault in it, or a clean one misquoted."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from specverify.backends import faults
from specverify.backends.compositions import open_cpu
from specverify.properties.invariants import ALL
from specverify.properties.verdict.finding import Finding
from specverify.properties.verdict.judge import judge
from specverify.properties.verdict.subject import Crash, Refusal, Subject
from specverify.reference.case import Case
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.trace import Array, Trace
from specverify.setup.subjects import subject_of

BY_NAME = {invariant.name: invariant for invariant in ALL}
ORACLE = Oracle(keep=1024)

Corruption = Callable[[Case, Trace, int], Trace]
"""A trace as a broken backend would have shown it; the number says how often the case ran before."""


def subject_with_fault(name: str) -> Subject:
    """Our engine with the fault of that name in it."""
    backend = open_cpu()
    faults.plant(backend, faults.fault_named(name))
    return subject_of(backend)


def corrupted_subject(corruption: Corruption) -> Subject:
    """The clean engine with every trace corrupted; its tables stay right."""
    clean = subject_of(open_cpu())
    ran: Counter[Case] = Counter()

    def run(case: Case) -> Trace | Refusal | Crash:
        ran[case] += 1
        return corruption(case, clean(case), ran[case] - 1)

    return Subject("corrupted", run, clean.reveals, tables=clean.tables, takes_tape=clean.takes_tape)


def wrong(how: str | Corruption) -> Subject:
    """A subject that is wrong: by the fault of that name, or by a corruption."""
    return subject_with_fault(how) if isinstance(how, str) else corrupted_subject(how)


def outcomes(name: str, subject: Subject, cases: Mapping[str, Case]) -> Iterator[tuple[str, str, tuple[Finding, ...]]]:
    """What the invariant of that name says about each case: its key, the outcome and the findings."""
    for key, case in cases.items():
        verdict = judge(case, (BY_NAME[name],), ORACLE, subject)
        yield key, verdict.outcomes[name], verdict.findings


def entry(array: Array, index: Any, value: Any) -> Array:
    """A copy of `array` with `value` at `index`."""
    copy: Array = array.copy()
    copy[index] = value
    return copy


def in_stage(stage: str, change: Callable[[Any], Any], step: int = 0) -> Corruption:
    """Replace one stage of one step, where there is such a step."""

    def corruption(case: Case, trace: Trace, time: int) -> Trace:
        if step >= len(trace.steps) or getattr(trace.steps[step], stage) is None:
            return trace
        changed_step = replace(trace.steps[step], **{stage: change(getattr(trace.steps[step], stage))})
        return replace(trace, steps=(*trace.steps[:step], changed_step, *trace.steps[step + 1 :]))

    return corruption


def where(condition: Callable[[Case], bool], corruption: Corruption) -> Corruption:
    """The corruption of the cases that meet the condition."""
    return lambda case, trace, time: corruption(case, trace, time) if condition(case) else trace


def second_time(corruption: Corruption, time: int = 1) -> Corruption:
    """The corruption of a case that ran before."""
    return lambda case, trace, number: corruption(case, trace, number) if number >= time else trace


def output_of(change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Corruption:
    """The output alone, changed."""
    return lambda case, trace, time: replace(trace, output=change(trace.output))
