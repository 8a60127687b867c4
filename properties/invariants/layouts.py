"""Layouts: where keys and values lie, what lies beside them, and in which pages, changes nothing that comes out."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from properties.invariants.rows import compared, kv_differs, placed, rows_of
from properties.tolerance.closeness import noise
from properties.verdict.finding import Compared, Finding
from properties.verdict.invariant import TURNS, Fact, Invariant, NotApplicable, Oracle, Unobserved, needing
from properties.verdict.subject import Subject
from properties.verdict.variants import dice
from reference.case import Case
from reference.layout import PLAIN, POISONS, KvLayout
from reference.trace import Array, Stage, Step, Trace

"""Layouts that run the same operations in the same shapes on the same numbers (DESIGN.md)."""


def requests(trace: Trace) -> list[tuple[dict[str, int | str], Trace]]:
    """Every request of a run, with what names it in a finding."""
    if trace.shared is None:
        return [({}, trace)]
    return [({"request": number}, one) for number, one in enumerate(trace.shared.requests) if one is not None]


def _same_bits(name: str, case: Case, subject: Subject, layout: KvLayout, variant: str) -> Iterator[Finding | Compared]:
    """Findings where logits, attention or output of the variant are not bit for bit those of the case."""
    base, other = subject(case), subject(replace(case, layout=layout))
    for (place, one), (_, twin) in zip(requests(base), requests(other), strict=False):
        where = {**place, "variant": variant}
        for number, (step, twin_step) in enumerate(zip(one.steps, twin.steps, strict=False)):
            for stage, seen, true in _arrays(twin_step, step):
                yield Compared(rows_of(true))
                if seen.shape != true.shape or not np.array_equal(seen, true, equal_nan=True):
                    values = ("the same bits", _first_unlike(seen, true))
                    yield Finding(name, stage, number, where, *values)
                    return
        if one.output != twin.output:
            yield Finding(name, Stage.EMITTED, max(len(one.steps) - 1, 0), where, one.output, twin.output)
            return


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
    if seen.shape != true.shape:
        return f"shape {seen.shape}, not {true.shape}"
    at = tuple(int(one) for one in np.argwhere((seen != true) & ~(np.isnan(seen) & np.isnan(true)))[0])
    return f"{float(seen[at])!r} at {list(at)}, not {float(true[at])!r}"


def stale_unreachable(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Fill free, padded and stale cells with something else before each step: the same bits come out."""
    others = [one for one in POISONS if one != case.layout.poison]
    poison = others[int(dice(case, "poison").integers(len(others)))]
    layout = replace(case.layout, poison=poison)
    yield from _same_bits("cache.stale-unreachable", case, subject, layout, f"poison {poison or 'none'}")


def page_permutation(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Hand out the same pages in another order: the same bits come out."""
    layout = case.layout
    if len(layout.pages) < 2:
        raise NotApplicable("fewer than two pages in the free list have one order")
    turned = tuple(int(one) for one in dice(case, "pages").permutation(layout.pages))
    other = replace(layout, pages=turned if turned != layout.pages else layout.pages[::-1])
    yield from _same_bits("attention.page-permutation", case, subject, other, "pages in another order")


def page_boundary(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Cut the same columns into pages of another size: the same bits come out."""
    if case.session is not None and case.layout.pages:
        raise NotApplicable("requests share a pool of so many pages: where pages end decides which of them waits")
    size = int(dice(case, "size").integers(1, 9))
    size += size == case.layout.page_size
    columns = len(case.layout.pages) * case.layout.page_size
    if case.layout.pages and columns % size:
        raise NotApplicable(f"{columns} columns do not fill pages of {size}")
    layout = replace(case.layout, page_size=size, pages=tuple(range(columns // size)) if case.layout.pages else ())
    yield from _same_bits("cache.page-boundary", case, subject, layout, f"pages of {size} columns")


def layout_equivalent(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Branch and commit by path on the same case: the same output, and the same numbers."""
    name = "cache.layout-equivalent"
    plain = replace(case.layout, kind=PLAIN, commit="path", page_size=0, pages=(), overhang=0, poison="")
    if case.layout.traits.bitwise:
        yield from _same_bits(name, case, subject, plain, "branch and commit by path")
        return
    base, other = subject(case), subject(replace(case, layout=plain))
    error = noise(case, oracle, subject)
    for number, (one, twin) in enumerate(zip(base.steps, other.steps, strict=False)):
        if one.drafted is None or twin.drafted is None:
            raise Unobserved("the backend does not reveal its trees")
        if one.context != twin.context or one.drafted.tree != twin.drafted.tree:
            raise NotApplicable("the two layouts went on with other tokens, which a near-tie may excuse")
        rows = list(range(len(one.drafted.tree)))
        for fact in compared(name, one, twin, rows, rows, error, "branch and commit by path"):
            yield placed(fact, number)
            if isinstance(fact, Finding):
                return
        if one.committed is not None and twin.committed is not None and one.accepted == twin.accepted:
            where: dict[str, int | str] = {"variant": "branch and commit by path"}
            yield from kv_differs(name, number, twin.committed.after, one.committed.after, error, where, 2.0)


def _poisonable(case: Case) -> bool:
    return case.layout.kind != PLAIN or case.session is not None


def _paged(case: Case) -> bool:
    return case.layout.traits.pages


NEEDS = needing(Stage.SCORED)

INVARIANTS = (
    Invariant(
        "cache.stale-unreachable",
        "What lies in free, padded and stale cells changes no bit of what comes out.",
        NEEDS,
        stale_unreachable,
        _poisonable,
        every=TURNS,
        speaks_of="both",
    ),
    Invariant(
        "attention.page-permutation",
        "Which pages hold the columns changes no bit of what comes out.",
        NEEDS,
        page_permutation,
        _paged,
        every=TURNS,
        speaks_of="both",
    ),
    Invariant(
        "cache.page-boundary",
        "Where pages end changes no bit of what comes out.",
        NEEDS,
        page_boundary,
        lambda case: case.layout.traits.pages and not case.layout.traits.keeps_prefixes,
        every=TURNS,
        speaks_of="both",
    ),
    Invariant(
        "cache.layout-equivalent",
        "Every layout gives what branch and commit by path gives, bit for bit where the same operations run.",
        NEEDS,
        layout_equivalent,
        lambda case: case.layout.kind != PLAIN,
        every=TURNS,
    ),
)
