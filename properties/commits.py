"""Commits: which way a commit took, and why not the faster way asked for.

Both are read from the trace.
"""

import os
from collections import Counter

from reference.case import Case
from reference.layout import FAST_SWITCH, NO_PREFIX, NOT_IN_ORDER
from reference.trace import Step, Trace

FASTER = ("fast", "length")
"""Values of `KvLayout.commit` from which an engine may fall back to `path`."""


def counted(case: Case, trace: Trace) -> tuple[Counter[str], Counter[str]]:
    """Count the commits of `trace` that asked for a way of FASTER, and those of them that took another way.

    Returns:
        By the way asked for, the number of commits that asked; by `way: reason`, the number that fell back.
    """
    asked, fell_back = Counter[str](), Counter[str]()
    how = case.layout.commit
    if how in FASTER:
        # In a session every request commits; the layout is one for all.
        for run in (trace,) if trace.shared is None else trace.shared.requests:
            records = [step.committed for step in run.steps if step.committed is not None] if run is not None else []
            asked[how] += len(records)
            fell_back.update(f"{how}: {record.fallback}" for record in records if record.fallback is not None)
    return asked, fell_back


def admits(how: str, step: Step) -> bool:
    """Whether `step` could be committed by `how`: `fast` needs a committed prefix, `length` rows kept in their order.

    The rows kept are the accepted path, as far as its tokens were emitted. A step that does not reveal the path or the
    tokens counts as not admitting `length`.
    """
    if how == "fast":
        return bool(step.context)
    if step.accepted is None or step.emitted is None:
        return False
    # A block of k emitted tokens keeps k rows, the root's included: the last token has no KV yet.
    kept = step.accepted.path[: len(step.emitted.tokens)]
    return kept == tuple(range(len(kept)))


def untrue(how: str, step: Step) -> str | None:
    """The reason that `step` gives for a commit by another way than `how`, if it is false; None otherwise.

    Only the reasons of `reference.layout` can be checked from outside; a reason in an engine's own words cannot.
    """
    assert step.committed is not None
    why = step.committed.fallback
    if why is None:
        return "no reason"
    known = {NO_PREFIX: "fast", NOT_IN_ORDER: "length"}
    if known.get(why) == how and admits(how, step):
        return why
    # The engine runs in this environment, so the switch that it names can be looked up.
    if why == f"{FAST_SWITCH}=0" and os.environ.get(FAST_SWITCH) != "0":
        return why
    return None
