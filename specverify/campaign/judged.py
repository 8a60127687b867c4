"""The failure of a verdict that was not found by a search: its finding, its texts, and a hint."""

import time

from specverify.backends.adapters import known_faults
from specverify.campaign.shrinking import HINT_S
from specverify.checkpoints.words import with_words
from specverify.properties.reference_names import NUMPY
from specverify.properties.tally import Failure
from specverify.properties.texts import texts_of
from specverify.properties.verdict.finding import Finding, Verdict, error_of
from specverify.properties.verdict.invariant import Oracle
from specverify.properties.verdict.subject import Subject
from specverify.properties.witnesses import mistake_of


def failure_of(
    verdict: Verdict,
    oracle: Oracle,
    subject: Subject,
    *,
    finding: Finding | None = None,
    backend: str,
    fault: str | None = None,
    against: str | None = None,
    reference: str = NUMPY,
    model: str | None = None,
    file: str | None = None,
    drawn: str = "",
) -> Failure | None:
    """The failure of `verdict` at `finding`, by default its first one; None where nothing differs.

    Args:
        verdict: The verdict on a case of `subject`, with its trace.
        oracle: The reference.
        subject: The backend.
        finding: The finding to tell.
        backend: The argument of `--backend`, and so on for the others.
        fault: The planted fault.
        against: The reference in the oracle's place.
        reference: What computed the oracle.
        model: The checkpoint.
        file: The bundle that holds the case.
        drawn: The id under which the case was drawn; by default its own.
    """
    located = finding or verdict.first
    if located is None:
        return None
    failure = Failure(
        verdict,
        located,
        drawn or verdict.case.id,
        file=file,
        fault=fault,
        backend=backend,
        model=model,
        against=against,
        reference=reference,
        texts=texts_of(verdict, located, oracle),
        known=known_faults(backend, verdict.case, located.invariant, error_of(located)),
        mistake=mistake_of(verdict.case, located, oracle, subject, time.monotonic() + HINT_S),
    )
    return with_words(failure)
