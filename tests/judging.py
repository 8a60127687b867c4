"""Verdicts on backends that are opened in this process."""

from specverify.backends.base import Backend
from specverify.properties.invariants import ALL
from specverify.properties.verdict.finding import Verdict
from specverify.properties.verdict.judge import judge
from specverify.reference.case import Case
from specverify.reference.oracle.decoder import Oracle
from specverify.setup.subjects import subject_of

ORACLE = Oracle()


def verdict_of(backend: Backend, case: Case, *names: str) -> Verdict:
    """The verdict on `case` of all invariants, or of those named."""
    invariants = tuple(invariant for invariant in ALL if not names or invariant.name in names)
    return judge(case, invariants, ORACLE, subject_of(backend))
