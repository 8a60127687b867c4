"""Bitwise comparison of a case with a variant of its KV layout."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from properties.invariants.rows import rows_of
from properties.verdict.finding import Compared, Finding
from properties.verdict.subject import Subject
from reference.case import Case
from reference.layout import KvLayout
from reference.trace import Array, Stage, Step, Trace


def requests(trace: Trace) -> list[tuple[dict[str, int | str], Trace]]:
    """Every request of a run, each with the coordinates that name it in a finding."""
    if trace.shared is None:
        return [({}, trace)]
    return [({"request": number}, one) for number, one in enumerate(trace.shared.requests) if one is not None]


def same_bits(name: str, case: Case, subject: Subject, layout: KvLayout, variant: str) -> Iterator[Finding | Compared]:
    """Findings where attention, logits, caches or output of the variant differ in a bit from those of the case."""
    base, other = subject(case), subject(replace(case, layout=layout))
    # Not strict: runs of different lengths are a finding about the output, below.
    for (place, one), (_, twin) in zip(requests(base), requests(other), strict=False):
        found = False
        for fact in unlike_bits(name, one, twin, {**place, "variant": variant}):
            found = found or isinstance(fact, Finding)
            yield fact
        if found:
            return


def unlike_bits(name: str, one: Trace, twin: Trace, where: dict[str, int | str]) -> Iterator[Finding | Compared]:
    """A finding where attention, logits, caches or output of request `twin` differ in a bit from those of `one`."""
    for number, (step, twin_step) in enumerate(zip(one.steps, twin.steps, strict=False)):
        for stage, seen, true in _arrays(twin_step, step):
            yield Compared(rows_of(true))
            if seen.shape != true.shape or not np.array_equal(seen, true, equal_nan=True):
                values = ("the same bits", _first_unlike(seen, true))
                yield Finding(name, stage, number, where, *values)
                return
    if one.output != twin.output:
        yield Finding(name, Stage.EMITTED, max(len(one.steps) - 1, 0), where, one.output, twin.output)


def _arrays(seen: Step, true: Step) -> Iterator[tuple[Stage, Array, Array]]:
    if seen.attended is not None and true.attended is not None:
        yield Stage.ATTENDED, seen.attended.output, true.attended.output
    if seen.scored is not None and true.scored is not None:
        yield Stage.SCORED, seen.scored.logits, true.scored.logits
    for kind in ("before", "after", "draft"):
        kept = [getattr(step.committed, kind) for step in (seen, true) if step.committed is not None]
        if len(kept) == 2 and None not in kept:
            yield Stage.COMMITTED, kept[0].keys, kept[1].keys
            yield Stage.COMMITTED, kept[0].values, kept[1].values


def _first_unlike(seen: Array, true: Array) -> str:
    # NaN marks columns that a layer has let go: NaN in both arrays is no difference.
    if seen.shape != true.shape:
        return f"shape {seen.shape}, not {true.shape}"
    at = tuple(int(one) for one in np.argwhere((seen != true) & ~(np.isnan(seen) & np.isnan(true)))[0])
    return f"{float(seen[at])!r} at {list(at)}, not {float(true[at])!r}"
