"""Invariants of sessions: batch order and other requests do not change a request."""

from collections.abc import Iterator
from dataclasses import replace

from properties.invariants.same_request import accounts_of, alike, in_session, present
from properties.verdict.invariant import TURNS, Fact, Invariant, NotApplicable, Oracle, needing
from properties.verdict.session_members import members
from properties.verdict.subject import Subject
from properties.verdict.variants import dice
from reference.case import Case
from reference.session import BATCHES, Session
from reference.trace import Stage


def schedule_independent(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """With every batch in reverse order, each request keeps its numbers and tokens."""
    assert case.session is not None
    turned = tuple(
        replace(one, requests=one.requests[::-1]) if one.kind in BATCHES else one for one in case.session.actions
    )
    accounts = accounts_of(subject(case))
    together = [
        at
        # Without accounts every reversed action counts; with them, only one that finds two requests present.
        for at, one in enumerate(turned)
        if one != case.session.actions[at] and (not accounts or len(present(accounts, at) & set(one.requests)) > 1)
    ]
    if not together:
        raise NotApplicable("no action finds two requests")
    other = subject(replace(case, session=Session(case.session.mates, turned)))
    for member in members(case, subject(case)):
        twin = other.shared.requests[member.number] if other.shared is not None else None
        if twin is not None:
            variant = "every batch in reverse order"
            yield from alike("lossless.schedule-independent", member, twin, oracle, subject, variant)


def state_isolated(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Without one of the interruptions, every request that it did not name keeps its numbers and tokens."""
    assert case.session is not None
    kinds = ("preempt", "cancel", "evict")
    places = [at for at, one in enumerate(case.session.actions) if one.kind in kinds]
    accounts = accounts_of(subject(case))
    if accounts:  # an interruption that met no living request changes nothing, so its removal proves nothing
        places = [at for at in places if present(accounts, at) & set(case.session.actions[at].requests)]
    stepped = {member.number for member in members(case, subject(case))}
    places = [at for at in places if stepped - set(case.session.actions[at].requests)]
    if not places:
        raise NotApplicable("nothing is interrupted beside a request that took a step")
    at = places[int(dice(case, "interruption").integers(len(places)))]
    gone = case.session.actions[at]
    actions = (*case.session.actions[:at], *case.session.actions[at + 1 :])
    other = subject(replace(case, session=Session(case.session.mates, actions)))
    for member in members(case, subject(case)):
        twin = other.shared.requests[member.number] if other.shared is not None else None
        if twin is not None and member.number not in gone.requests:
            variant = f"without action {at}, {gone.kind} of {list(gone.requests)}"
            yield from alike("lossless.interruption-isolated", member, twin, oracle, subject, variant)


SCORED = needing(Stage.SCORED)

INVARIANTS = (
    Invariant(
        "lossless.schedule-independent",
        "The order of the requests in a batch changes nothing.",
        SCORED,
        schedule_independent,
        in_session,
        every=TURNS,
        speaks_of="session",
    ),
    Invariant(
        "lossless.interruption-isolated",
        "A request that is cancelled, evicted or thrown back leaves every other one's output unchanged.",
        SCORED,
        state_isolated,
        in_session,
        every=TURNS,
        speaks_of="session",
    ),
)
