"""Invariants of whole runs: neither the order of pages nor other requests change what comes out."""

from collections.abc import Iterator
from dataclasses import replace

from specverify.properties.invariants.two_runs import compare_request, has_session, same_bits
from specverify.properties.verdict.invariant import TURNS, Fact, Invariant, NotApplicable, Oracle, needing
from specverify.properties.verdict.session_members import members
from specverify.properties.verdict.subject import Subject
from specverify.properties.verdict.variants import dice
from specverify.reference.case import Case
from specverify.reference.trace import Stage


def page_permutation(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """With the free list in another order, logits, attention, caches and output have the same bits."""
    layout = case.layout
    # An empty list means that the pool hands out its pages by id.
    if len(layout.pages) < 2:
        raise NotApplicable("fewer than two pages in the free list have one order")
    order = tuple(int(page) for page in dice(case, "pages").permutation(layout.pages))
    # A permutation may come out as the identity, which would compare the case with itself.
    variant_layout = replace(layout, pages=order if order != layout.pages else layout.pages[::-1])
    yield from same_bits("attention.page-permutation", case, subject, variant_layout, "pages in another order")


def mate_independent(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Each request, run alone for the same number of steps, has the numbers and tokens that it has in the batch."""
    for member in members(case, subject(case)):
        alone = subject(member.alone)
        yield from compare_request("attention.batch-mate-independent", member, alone, oracle, subject, "alone")


INVARIANTS = (
    Invariant(
        "attention.page-permutation",
        "Which pages hold the columns changes no bit of what comes out.",
        needing(Stage.SCORED),
        page_permutation,
        lambda case: case.layout.traits.pages,
        every=TURNS,
        speaks_of="both",
    ),
    Invariant(
        "attention.batch-mate-independent",
        "A request's numbers and tokens are those that it has alone.",
        needing(Stage.SCORED),
        mate_independent,
        has_session,
        every=2,
        speaks_of="session",
    ),
)
