"""Data parallelism: which rank has which request of a session.

Every rank holds the whole target. Requests are shared out by their numbers, and a fork's twin follows its source, whose
pages it shares.
"""

from specverify.reference.session import Session


def owners(session: Session | None, ranks: int) -> tuple[int, ...]:
    """The rank of each request; request 0 alone where there is no session."""
    if session is None:
        return (0,)
    ranks_of = [number % ranks for number in range(1 + len(session.mates))]
    entered_requests: set[int] = set()
    for action in session.actions:
        if action.kind == "fork" and action.requests[1] not in entered_requests:
            ranks_of[action.requests[1]] = ranks_of[action.requests[0]]
        if action.kind in ("add", "fork"):
            entered_requests |= set(action.requests)
    return tuple(ranks_of)
