"""The invariant of a hand-over: a request goes on as if it had stayed."""

from collections.abc import Iterator
from dataclasses import replace

from specverify.properties.invariants.same_bits import unlike_bits
from specverify.properties.invariants.same_request import accounts_of, compare_request, present_requests
from specverify.properties.verdict.finding import Finding
from specverify.properties.verdict.invariant import TURNS, Fact, Invariant, NotApplicable, Oracle, needing
from specverify.properties.verdict.session_members import members
from specverify.properties.verdict.subject import Subject
from specverify.reference.case import Case
from specverify.reference.session import Session
from specverify.reference.trace import Stage

NAME = "serving.hand-over"


def has_hand_over(case: Case) -> bool:
    """Whether a request of the case is handed over."""
    return case.session is not None and any(action.kind == "hand-over" for action in case.session.actions)


def stays(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Without its hand-overs, every request keeps its numbers and tokens, and in most layouts its bits.

    Keys and values are copies and the kernels the same. Where pages are kept for later requests, or few, a hand-over
    changes which pages are free, hence which tokens are prefilled or wait: there numbers agree within noise.
    """
    assert case.session is not None
    trace = subject(case)
    actions = case.session.actions
    layout = case.layout
    accounts = accounts_of(trace)
    places = [position for position, action in enumerate(actions) if action.kind == "hand-over"]
    if accounts and not any(
        present_requests(accounts, position) & set(actions[position].requests) for position in places
    ):
        raise NotApplicable("no request was there to be handed over")
    remaining_actions = tuple(action for action in actions if action.kind != "hand-over")
    if not remaining_actions:
        raise NotApplicable("nothing but hand-overs happens")
    variant_trace = subject(replace(case, session=Session(case.session.mates, remaining_actions)))
    # Launched steps are resolved before a hand-over: without it some may still be on their way in the end.
    exact = not layout.traits.keeps_prefixes and not layout.pages and not case.session.overlapped
    for member in members(case, trace):
        twin = variant_trace.shared.requests[member.number] if variant_trace.shared is not None else None
        if twin is None:
            continue
        variant = "without the hand-overs"
        has_finding = False
        for fact in compare_request(NAME, member, twin, oracle, subject, variant):
            has_finding = has_finding or isinstance(fact, Finding)
            yield fact
        # Rows of a draft may run again in other blocks: its scores, and the tree with them, round otherwise.
        has_model = member.alone.draft.reads is not None or member.alone.draft.model is not None
        if exact and not has_finding and not has_model:
            yield from unlike_bits(NAME, member.trace, twin, {"request": member.number, "variant": variant})


INVARIANTS = (
    Invariant(
        NAME,
        "A request that is handed over to another server goes on with the numbers and tokens that it would have had.",
        needing(Stage.SCORED),
        stays,
        has_hand_over,
        every=TURNS,
        speaks_of="session",
    ),
)
