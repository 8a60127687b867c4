"""Bitwise comparison of a case with a variant of its KV layout."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from specverify.properties.invariants.rows import rows_of
from specverify.properties.verdict.finding import Comparisons, Finding
from specverify.properties.verdict.subject import Subject
from specverify.reference.case import Case
from specverify.reference.layout import KvLayout
from specverify.reference.trace import Array, Stage, Step, Trace


def requests(trace: Trace) -> list[tuple[dict[str, int | str], Trace]]:
    """Every request of a run, each with the coordinates that name it in a finding."""
    if trace.shared is None:
        return [({}, trace)]
    return [({"request": number}, run) for number, run in enumerate(trace.shared.requests) if run is not None]


def same_bits(
    name: str, case: Case, subject: Subject, layout: KvLayout, variant: str
) -> Iterator[Finding | Comparisons]:
    """Findings where attention, logits, caches or output of the variant differ in a bit from those of the case."""
    base = subject(case)
    variant_trace = subject(replace(case, layout=layout))
    # Not strict: runs of different lengths are a finding about the output, below.
    for (place, base_request), (_, twin) in zip(requests(base), requests(variant_trace), strict=False):
        has_finding = False
        for fact in unlike_bits(name, base_request, twin, {**place, "variant": variant}):
            has_finding = has_finding or isinstance(fact, Finding)
            yield fact
        if has_finding:
            return


def unlike_bits(name: str, base: Trace, twin: Trace, where: dict[str, int | str]) -> Iterator[Finding | Comparisons]:
    """A finding where attention, logits, caches or output of request `twin` differ in a bit from those of `base`."""
    for number, (step, twin_step) in enumerate(zip(base.steps, twin.steps, strict=False)):
        for stage, observed, true in _arrays(twin_step, step):
            yield Comparisons(rows_of(true))
            if observed.shape != true.shape or not np.array_equal(observed, true, equal_nan=True):
                values = ("the same bits", _first_unlike(observed, true))
                yield Finding(name, stage, number, where, *values)
                return
    if base.output != twin.output:
        yield Finding(name, Stage.EMITTED, max(len(base.steps) - 1, 0), where, base.output, twin.output)


def _arrays(observed: Step, true: Step) -> Iterator[tuple[Stage, Array, Array]]:
    if observed.attended is not None and true.attended is not None:
        yield Stage.ATTENDED, observed.attended.output, true.attended.output
    if observed.scored is not None and true.scored is not None:
        yield Stage.SCORED, observed.scored.logits, true.scored.logits
    for kind in ("before", "after", "draft"):
        caches = [getattr(step.committed, kind) for step in (observed, true) if step.committed is not None]
        if len(caches) == 2 and None not in caches:
            yield Stage.COMMITTED, caches[0].keys, caches[1].keys
            yield Stage.COMMITTED, caches[0].values, caches[1].values


def _first_unlike(observed: Array, true: Array) -> str:
    # NaN marks columns that a layer has let go: NaN in both arrays is no difference.
    if observed.shape != true.shape:
        return f"shape {observed.shape}, not {true.shape}"
    index = tuple(int(part) for part in np.argwhere((observed != true) & ~(np.isnan(observed) & np.isnan(true)))[0])
    return f"{float(observed[index])!r} at {list(index)}, not {float(true[index])!r}"
