"""Invariants of sessions: batch order and other requests do not change a request."""

from collections.abc import Iterator
from dataclasses import replace

from specverify.properties.invariants.same_request import accounts_of, compare_request, has_session, present_requests
from specverify.properties.verdict.invariant import TURNS, Fact, Invariant, NotApplicable, Oracle, needing
from specverify.properties.verdict.session_members import members
from specverify.properties.verdict.subject import Subject
from specverify.properties.verdict.variants import dice
from specverify.reference.case import Case
from specverify.reference.session import BATCHES, Session
from specverify.reference.trace import Stage


def schedule_independent(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """With every batch in reverse order, each request keeps its numbers and tokens."""
    assert case.session is not None
    reversed_actions = tuple(
        replace(action, requests=action.requests[::-1]) if action.kind in BATCHES else action
        for action in case.session.actions
    )
    accounts = accounts_of(subject(case))
    positions = [
        position
        # Without accounts every reversed action counts; with them, only one that finds two requests present.
        for position, action in enumerate(reversed_actions)
        if action != case.session.actions[position]
        and (not accounts or len(present_requests(accounts, position) & set(action.requests)) > 1)
    ]
    if not positions:
        raise NotApplicable("no action finds two requests")
    reversed_trace = subject(replace(case, session=Session(case.session.mates, reversed_actions)))
    for member in members(case, subject(case)):
        twin = reversed_trace.shared.requests[member.number] if reversed_trace.shared is not None else None
        if twin is not None:
            variant = "every batch in reverse order"
            yield from compare_request("lossless.schedule-independent", member, twin, oracle, subject, variant)


def interruption_isolated(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Without one of the interruptions, every request that it did not name keeps its numbers and tokens."""
    assert case.session is not None
    kinds = ("preempt", "cancel", "evict")
    places = [position for position, action in enumerate(case.session.actions) if action.kind in kinds]
    accounts = accounts_of(subject(case))
    if accounts:  # an interruption that met no living request changes nothing, so its removal proves nothing
        places = [
            position
            for position in places
            if present_requests(accounts, position) & set(case.session.actions[position].requests)
        ]
    stepped = {member.number for member in members(case, subject(case))}
    places = [position for position in places if stepped - set(case.session.actions[position].requests)]
    if not places:
        raise NotApplicable("nothing is interrupted beside a request that took a step")
    position = places[int(dice(case, "interruption").integers(len(places)))]
    removed = case.session.actions[position]
    actions = (*case.session.actions[:position], *case.session.actions[position + 1 :])
    variant_trace = subject(replace(case, session=Session(case.session.mates, actions)))
    for member in members(case, subject(case)):
        twin = variant_trace.shared.requests[member.number] if variant_trace.shared is not None else None
        if twin is not None and member.number not in removed.requests:
            variant = f"without action {position}, {removed.kind} of {list(removed.requests)}"
            yield from compare_request("lossless.interruption-isolated", member, twin, oracle, subject, variant)


SCORED = needing(Stage.SCORED)

INVARIANTS = (
    Invariant(
        "lossless.schedule-independent",
        "The order of the requests in a batch changes nothing.",
        SCORED,
        schedule_independent,
        has_session,
        every=TURNS,
        speaks_of="session",
    ),
    Invariant(
        "lossless.interruption-isolated",
        "A request that is cancelled, evicted or thrown back leaves every other one's output unchanged.",
        SCORED,
        interruption_isolated,
        has_session,
        every=TURNS,
        speaks_of="session",
    ),
)
