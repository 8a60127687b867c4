"""The requests of a session whose prompts still wait for columns, where forwards of steps fill them."""

from itertools import pairwise

from specverify.reference.case import Case
from specverify.reference.session import Account
from specverify.reference.trace import Shared

FIRST_ACCOUNT = Account((), 0, {}, (), {}, {})
"""The account before the first action."""


def missing_columns(case: Case, shared: Shared) -> tuple[dict[int, int], ...]:
    """Before each action, and behind the last, the requests whose prompt has too few columns, and how many it needs.

    A request that enters needs the columns of its prompt but for the last token. One that comes back needs those that
    it had when it was evicted, or was to have: its prompt is filled before an eviction. Without `mixed_prefill` no
    request ever waits.
    """
    if case.session is None or not case.layout.mixed_prefill:
        return ({},) * (len(shared.accounts) + 1)
    needed: dict[int, int] = {}
    evicted: dict[int, int] = {}
    missing = [needed]
    accounts = pairwise((FIRST_ACCOUNT, *shared.accounts))
    for action, (before, after) in zip(case.session.actions, accounts, strict=False):
        number = action.requests[-1]
        if action.kind == "evict" and number in before.committed:
            evicted[number] = max(before.committed[number], needed.get(number, 0))
        elif number in after.committed and number not in before.committed:
            restored = action.kind == "restore" and number in evicted
            needed = {**needed, number: evicted[number] if restored else len(shared.prompts[number]) - 1}
        needed = {
            number: columns for number, columns in needed.items() if after.committed.get(number, columns) < columns
        }
        missing.append(needed)
    return tuple(missing)
