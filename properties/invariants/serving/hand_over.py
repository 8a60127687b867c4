"""The invariant of a hand-over: a request goes on as if it had stayed."""

from collections.abc import Iterator
from dataclasses import replace

from properties.invariants.same_bits import unlike_bits
from properties.invariants.same_request import accounts_of, alike, present
from properties.verdict.finding import Finding
from properties.verdict.invariant import TURNS, Fact, Invariant, NotApplicable, Oracle, needing
from properties.verdict.session_members import members
from properties.verdict.subject import Subject
from reference.case import Case
from reference.session import Session
from reference.trace import Stage

NAME = "serving.hand-over"


def hands_over(case: Case) -> bool:
    """Whether a request of the case is handed over."""
    return case.session is not None and any(one.kind == "hand-over" for one in case.session.actions)


def stays(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Without its hand-overs, every request keeps its numbers and tokens, and in most layouts its bits.

    Keys and values are copies and the kernels the same. Where pages are kept for later requests, or few, a hand-over
    changes which pages are free, hence which tokens are prefilled or wait: there numbers agree within noise.
    """
    assert case.session is not None
    trace, actions, layout = subject(case), case.session.actions, case.layout
    accounts = accounts_of(trace)
    places = [at for at, one in enumerate(actions) if one.kind == "hand-over"]
    if accounts and not any(present(accounts, at) & set(actions[at].requests) for at in places):
        raise NotApplicable("no request was there to be handed over")
    without = tuple(one for one in actions if one.kind != "hand-over")
    if not without:
        raise NotApplicable("nothing but hand-overs happens")
    other = subject(replace(case, session=Session(case.session.mates, without)))
    # Launched steps are resolved before a hand-over: without it some may still be on their way in the end.
    exact = not layout.traits.keeps_prefixes and not layout.pages and not case.session.overlapped
    for member in members(case, trace):
        twin = other.shared.requests[member.number] if other.shared is not None else None
        if twin is None:
            continue
        variant = "without the hand-overs"
        found = False
        for fact in alike(NAME, member, twin, oracle, subject, variant):
            found = found or isinstance(fact, Finding)
            yield fact
        # Rows of a draft may run again in other blocks: its scores, and the tree with them, round otherwise.
        drafted = member.alone.draft.reads is not None or member.alone.draft.model is not None
        if exact and not found and not drafted:
            yield from unlike_bits(NAME, member.trace, twin, {"request": member.number, "variant": variant})


INVARIANTS = (
    Invariant(
        NAME,
        "A request that is handed over to another server goes on with the numbers and tokens that it would have had.",
        needing(Stage.SCORED),
        stays,
        hands_over,
        every=TURNS,
        speaks_of="session",
    ),
)
