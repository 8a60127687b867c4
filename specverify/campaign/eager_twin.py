"""A failing case judged again on the eager backend of the same device.

If the eager backend agrees, the fault lies in the fused attention of the failing backend.
"""

from dataclasses import replace

from specverify.backends.base import Unavailable
from specverify.backends.registry import eager_beside
from specverify.isolation import door
from specverify.isolation.backend_spec import BackendSpec
from specverify.properties.invariants import EVERY_INVARIANT
from specverify.properties.tally import EagerOutcome, Failure
from specverify.properties.verdict.invariant import Oracle
from specverify.properties.verdict.judge import judge


def with_eager(failure: Failure, oracle: Oracle) -> Failure:
    """The failure, with the verdict of the device's eager backend on its case, under the invariants that failed.

    No fault is planted in the eager backend.
    """
    name = eager_beside(failure.backend)
    if name is None:
        return failure
    return replace(failure, beside=_judge_again(name, failure, oracle))


def _judge_again(name: str, failure: Failure, oracle: Oracle) -> EagerOutcome:
    failed = {finding.invariant for finding in failure.verdict.findings}
    # Only the invariants that failed: the question is whether the same finding appears.
    concerned = tuple(invariant for invariant in EVERY_INVARIANT if invariant.name in failed)
    case = failure.verdict.case
    try:
        with door.open_backend(BackendSpec(name, threads=1 if failure.model is None else 0)) as backend:
            backend.admit(case.sampling.processors, (case.model.vocab_size,))
            verdict = judge(case, concerned, oracle, backend.subject())
    except Unavailable as why:
        return EagerOutcome(name, f"not run: {why}")
    if verdict.first is not None:
        return EagerOutcome(name, "differs", verdict.first)
    if verdict.unsupported is not None:
        return EagerOutcome(name, f"not judged: {verdict.unsupported}")
    if verdict.internal:
        first = verdict.internal[0]
        return EagerOutcome(name, f"not judged: internal error in {first.invariant}: {first.why}")
    # Agreement needs a comparison; without one the eager backend proves nothing.
    return EagerOutcome(name, "agrees" if "checked" in verdict.outcomes.values() else "not judged")
