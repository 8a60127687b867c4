"""Commits: which way accepted rows came home, by the trace, and why not by the faster way that the case asked for."""

import os
from collections import Counter

from reference.case import Case
from reference.layout import FAST_SWITCH, NO_PREFIX, NOT_IN_ORDER
from reference.trace import Step, Trace

FASTER = ("fast", "length")
"""Ways of `KvLayout.commit` that an engine may fall back from."""


def counted(case: Case, trace: Trace) -> tuple[Counter[str], Counter[str]]:
    """Commits of `trace` that asked for a way of FASTER, and those of them that took another.

    Returns:
        By the way that was asked for, how many commits asked; by `way: reason`, how many fell back.
    """
    asked, fell_back = Counter[str](), Counter[str]()
    how = case.layout.commit
    if how in FASTER:
        for run in (trace,) if trace.shared is None else trace.shared.requests:
            records = [step.committed for step in run.steps if step.committed is not None] if run is not None else []
            asked[how] += len(records)
            fell_back.update(f"{how}: {record.fallback}" for record in records if record.fallback is not None)
    return asked, fell_back


def admits(how: str, step: Step) -> bool:
    """Whether `step` could be committed by `how`: `fast` needs a committed prefix, `length` rows kept in their order.

    The rows kept are the accepted path, as far as its tokens were emitted; a step that does not reveal them is taken
    to admit nothing.
    """
    if how == "fast":
        return bool(step.context)
    if step.accepted is None or step.emitted is None:
        return False
    kept = step.accepted.path[: len(step.emitted.tokens)]
    return kept == tuple(range(len(kept)))


def untrue(how: str, step: Step) -> str | None:
    """The error in the reason that `step` gives for a commit by another way than `how`; None where there is none.

    A reason of an engine's own words cannot be judged from outside; those of `reference.layout` can.
    """
    assert step.committed is not None
    why = step.committed.fallback
    if why is None:
        return "no reason"
    known = {NO_PREFIX: "fast", NOT_IN_ORDER: "length"}
    if known.get(why) == how and admits(how, step):
        return why
    if why == f"{FAST_SWITCH}=0" and os.environ.get(FAST_SWITCH) != "0":
        return why
    return None
