"""Commits: which way a commit took, and why not the faster way asked for.

Both are read from the trace.
"""

import os
from collections import Counter

from specverify.reference.case import Case
from specverify.reference.layout import FAST_SWITCH, NO_PREFIX, NOT_IN_ORDER
from specverify.reference.trace import Step, Trace

FASTER = ("fast", "length")
"""Values of `KvLayout.commit` from which an engine may fall back to `path`."""


def count_commits(case: Case, trace: Trace) -> tuple[Counter[str], Counter[str]]:
    """The commits of `trace` that asked for a way of FASTER, by way, and those that took another, by `way: reason`."""
    commits = Counter[str]()
    fallbacks = Counter[str]()
    way = case.layout.commit
    if way in FASTER:
        # In a session every request commits; the layout is one for all.
        for run in (trace,) if trace.shared is None else trace.shared.requests:
            records = [step.committed for step in run.steps if step.committed is not None] if run is not None else []
            commits[way] += len(records)
            fallbacks.update(f"{way}: {record.fallback}" for record in records if record.fallback is not None)
    return commits, fallbacks


def admits(way: str, step: Step) -> bool:
    """Whether `step` could be committed by `way`: `fast` needs a committed prefix, `length` rows kept in their order.

    The rows kept are the accepted path, as far as its tokens were emitted. A step that does not reveal the path or the
    tokens counts as not admitting `length`.
    """
    if way == "fast":
        return bool(step.context)
    if step.accepted is None or step.emitted is None:
        return False
    # A block of k emitted tokens keeps k rows, the root's included: the last token has no KV yet.
    kept_rows = step.accepted.path[: len(step.emitted.tokens)]
    return kept_rows == tuple(range(len(kept_rows)))


def false_reason(way: str, step: Step) -> str | None:
    """The reason that `step` gives for a commit by another way than `way`, if it is false; None otherwise.

    Only the reasons of `specverify.reference.layout` can be checked from outside; a reason in an engine's own words
    cannot.
    """
    assert step.committed is not None
    reason = step.committed.fallback
    if reason is None:
        return "no reason"
    way_of_reason = {NO_PREFIX: "fast", NOT_IN_ORDER: "length"}
    if way_of_reason.get(reason) == way and admits(way, step):
        return reason
    # The engine runs in this environment, so the switch that it names can be looked up.
    if reason == f"{FAST_SWITCH}=0" and os.environ.get(FAST_SWITCH) != "0":
        return reason
    return None
