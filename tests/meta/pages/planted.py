"""Failures of planted faults, judged in this process on their smallest cases."""

from functools import cache

from specverify.properties.invariants import ALL
from specverify.properties.tally import Counts, Failure, Tally
from specverify.properties.verdict.judge import judge
from specverify.reference.oracle.decoder import Oracle
from specverify.reports import bundle
from specverify.setup.subjects import open_planted, subject_of
from tests.cases import CORPUS

FAULTS = {
    "lowered": "tree-masked-as-chain",
    "attended": "tiles-below-diagonal-unmasked",
    "committed": "kv-truncated-not-gathered",
}
"""A fault for each of three stages."""

INVARIANT_NAMES = {
    "structure.mask-is-ancestry",
    "attention.context-exact",
    "acceptance.greedy-walk",
    "cache.commit-equivalence",
    "lossless.greedy-match",
}
"""Invariants that need no run beside the case's own."""


@cache
def failure_of(fault: str) -> Failure:
    """The failure of a planted fault on its case of the corpus, with the backend's trace."""
    saved = bundle.load(CORPUS / f"{fault}.json")
    subject = subject_of(open_planted(saved.backend or "cpu-eager", fault, None), 8)
    verdict = judge(
        saved.case, [invariant for invariant in ALL if invariant.name in INVARIANT_NAMES], Oracle(), subject
    )
    assert verdict.first is not None
    near = saved.case.plain_decode()
    file = f".specverify/{saved.case.id}.json"
    return Failure(verdict, verdict.first, "0" * 12, 7, near, file, fault, saved.backend or "cpu-eager")


def tally_of(*failures: Failure) -> Tally:
    """A run that found these failures."""
    tally = Tally("cpu-eager", failures=list(failures), seconds=4.0, environment={"torch": "2"})
    for failure in failures:
        tally.add(failure.verdict)
    tally.log.note(0, "opened")
    tally.log.note(0, "differed")
    tally.invariants["draft.rollback"] = Counts(not_applicable=1)
    return tally
