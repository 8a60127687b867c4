"""The number of requests that stepped together, by a session's accounts."""

from itertools import pairwise

from reference.case import Case
from reference.session import Account
from reference.trace import Shared

ENTERED = Account((), 0, {}, (), {}, {})
"""The account before the first action."""


def batch_sizes(case: Case, shared: Shared) -> dict[int, tuple[int, ...]] | None:
    """For each request of the session, the number of requests of each batch with which it took a step.

    A request that a step names has stepped if it was living before the action, and then either has more tokens
    committed or is over. A request that waits for pages is left out by the engine, and commits nothing. None where the
    trace holds no accounts.
    """
    assert case.session is not None
    if not shared.accounts:
        return None
    found: dict[int, tuple[int, ...]] = {}
    for action, (before, after) in zip(case.session.actions, pairwise((ENTERED, *shared.accounts)), strict=False):
        if action.kind != "step":
            continue
        known, left = before.committed, after.committed
        stepped = [one for one in action.requests if one in known and left.get(one, known[one] + 1) > known[one]]
        for one in stepped:
            found[one] = (*found.get(one, ()), len(stepped))
    return found
