"""Invariant of batches: a request has the same numbers and tokens when run alone."""

from collections.abc import Iterator

from specverify.properties.invariants.same_request import compare_request, has_session
from specverify.properties.verdict.invariant import Fact, Invariant, Oracle, needing
from specverify.properties.verdict.session_members import members
from specverify.properties.verdict.subject import Subject
from specverify.reference.case import Case
from specverify.reference.trace import Stage


def mate_independent(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Each request, run alone for the same number of steps, has the numbers and tokens that it has in the batch."""
    for member in members(case, subject(case)):
        alone = subject(member.alone)
        yield from compare_request("attention.batch-mate-independent", member, alone, oracle, subject, "alone")


INVARIANTS = (
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
