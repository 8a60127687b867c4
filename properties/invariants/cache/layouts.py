"""Invariants of KV layouts: storage details do not change results.

The details are the place of keys and values, the values in unused cells beside them, the page size, and the layout
itself.
"""

from collections.abc import Iterator
from dataclasses import replace

from specverify.properties.invariants.rows import committed_reads, compare_kv, compare_rows, with_place
from specverify.properties.invariants.two_runs import same_bits
from specverify.properties.tolerance.closeness import noise
from specverify.properties.verdict.finding import Finding
from specverify.properties.verdict.invariant import TURNS, Fact, Invariant, NotApplicable, Oracle, Unobserved, needing
from specverify.properties.verdict.subject import Subject
from specverify.properties.verdict.variants import dice
from specverify.reference.case import Case
from specverify.reference.layout import PLAIN, POISONS
from specverify.reference.trace import Stage


def stale_unreachable(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """With other values (poison) in free, padded and stale cells before each step, all results have the same bits."""
    other_poisons = [value for value in POISONS if value != case.layout.poison]
    poison = other_poisons[int(dice(case, "poison").integers(len(other_poisons)))]
    layout = replace(case.layout, poison=poison)
    yield from same_bits("cache.stale-unreachable", case, subject, layout, f"poison {poison or 'none'}")


def page_boundary(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """With the same columns cut into pages of another size, all results have the same bits."""
    if case.session is not None and case.layout.pages:
        raise NotApplicable("requests share a pool of so many pages: where pages end decides which of them waits")
    size = int(dice(case, "size").integers(1, 9))
    size += size == case.layout.page_size  # never the case's own size
    # The pool must keep its number of columns, or requests would have another room.
    columns = len(case.layout.pages) * case.layout.page_size
    if case.layout.pages and columns % size:
        raise NotApplicable(f"{columns} columns do not fill pages of {size}")
    layout = replace(case.layout, page_size=size, pages=tuple(range(columns // size)) if case.layout.pages else ())
    if case.layout.draft_page_size:
        own_size = int(dice(case, "draft size").integers(1, 9))
        layout = replace(layout, draft_page_size=own_size + (own_size == case.layout.draft_page_size))
    yield from same_bits("cache.page-boundary", case, subject, layout, f"pages of {size} columns")


def layout_equivalent(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """The plain layout (a branch beside the cache, committed by path) gives the same output and the same numbers.

    Bits are compared where the layout promises them (`traits.bitwise`), numbers within noise elsewhere.
    """
    name = "cache.layout-equivalent"
    plain = replace(
        case.layout,
        kind=PLAIN,
        commit="path",
        page_size=0,
        pages=(),
        overhang=0,
        poison="",
        first_tier=0,
        second_tier=0,
        branches=0,
        draft_page_size=0,
        state_slots=0,
    )
    if case.layout.traits.bitwise:
        yield from same_bits(name, case, subject, plain, "branch and commit by path")
        return
    base = subject(case)
    plain_trace = subject(replace(case, layout=plain))
    error = noise(case, oracle, subject)
    for number, (step, twin) in enumerate(zip(base.steps, plain_trace.steps, strict=False)):
        if step.drafted is None or twin.drafted is None:
            raise Unobserved("the backend does not reveal its trees")
        if step.context != twin.context or step.drafted.tree != twin.drafted.tree:
            raise NotApplicable("the two layouts went on with other tokens, which a near-tie may excuse")
        rows = list(range(len(step.drafted.tree)))
        for fact in compare_rows(name, step, twin, rows, rows, error, "branch and commit by path"):
            yield with_place(fact, number)
            if isinstance(fact, Finding):
                return
        if step.committed is not None and twin.committed is not None and step.accepted == twin.accepted:
            where: dict[str, int | str] = {"variant": "branch and commit by path"}
            # Slack 2: each of the two runs has an error of its own.
            true = error.expected_kv(twin, step)
            reads = committed_reads(error, twin)
            yield from compare_kv(name, number, true, step.committed.after, error, where, 2.0, reads=reads)


NEEDS = needing(Stage.SCORED)

INVARIANTS = (
    Invariant(
        "cache.stale-unreachable",
        "What lies in free, padded and stale cells changes no bit of what comes out.",
        NEEDS,
        stale_unreachable,
        lambda case: case.layout.kind != PLAIN or case.session is not None,
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
        lambda case: case.layout.kind != PLAIN or case.layout.branches > 0,
        every=TURNS,
    ),
)
