"""Strategy for hand-overs whose packets hold more than columns of the KV cache.

A layer with a window sends the columns it has kept, and where they begin; a request with a grammar sends its place in
the text; a recurrent layer of the target or of a draft model sends its state. The hand-over is drawn for a case that
is drawn already, so that a case without it stays the same.
"""

from dataclasses import replace

from hypothesis import strategies as st

from specverify.properties.target_traits import has_recurrent_state
from specverify.reference.abilities import Abilities
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.malformed import Malformed
from specverify.reference.sampling import Sampling
from specverify.reference.session import Action, Session

HAND_OVER = "hand-over"
"""The action that is drawn here."""

LEFT_BEHIND = ("add", "step", "launch")
"""The actions behind which the first hand-over is drawn."""

ALONE = 2
"""Of so many such cases of a single request, one becomes a session of that request, with hand-overs."""

MOVED = 4
"""Of so many such sessions, all but one get hand-overs beside those that were drawn before."""


def takes_hand_over(case: Case, within: Abilities | None) -> bool:
    """Whether the engine hands requests over, and the case has one whose packet holds more than columns."""
    if within is not None and not (within.sessions and {"add", "step", HAND_OVER} <= {*within.actions}):
        return False
    # Ranks, dead columns and several branches are no part of a packet.
    fits_packet = case.ranks == 1 and not case.layout.left_pad and not case.layout.branches
    return fits_packet and bool(_telling_requests(case))


def _telling_requests(case: Case) -> tuple[int, ...]:
    """The requests of the case, by number, whose packet has more than columns.

    They have a grammar, windows in a layout that drops columns, or a recurrent state of the target or of their draft.
    """
    assert isinstance(case.model, Seeded)
    drops = case.layout.traits.ring and any(case.model.architecture.windows)
    every = drops or has_recurrent_state(case.model)
    mates = case.session.mates if case.session is not None else ()
    drafts = (case.draft, *(mate.draft for mate in mates))
    settings = _settings(case, case.session)
    return tuple(
        number
        for number, (sampling, draft) in enumerate(zip(settings, drafts, strict=True))
        if every or sampling.grammar is not None or has_recurrent_state(draft.model)
    )


def _settings(case: Case, session: Session | None) -> tuple[Sampling, ...]:
    """The settings of every request, by number."""
    return (case.sampling, *(mate.sampling for mate in (session.mates if session is not None else ())))


@st.composite
def with_hand_overs(draw: st.DrawFn, case: Case) -> Case:
    """`case` with two or three hand-overs of one request, each with a step behind it; some cases stay as they are."""
    session = case.session
    if session is None:
        if draw(st.integers(0, ALONE - 1)) < ALONE - 1:
            return case
        first_actions = (Action("add", (0,)), *(Action("step", (0,)),) * draw(st.sampled_from((1, 1, 2))))
        session = Session((), first_actions)
        case = replace(case, draft=case.draft.in_batches(()), steps=0)
    elif draw(st.integers(0, MOVED - 1)) == MOVED - 1:
        return case
    request = draw(st.sampled_from(_telling_requests(case)))
    guided = _settings(case, session)[request].grammar is not None
    # A grammar that has read nothing is the same on both sides.
    kinds = LEFT_BEHIND[1:] if guided else LEFT_BEHIND
    positions = [
        index for index, action in enumerate(session.actions) if request in action.requests and action.kind in kinds
    ]
    if not positions:
        return case
    # The request is over behind many of its later steps.
    position = draw(st.sampled_from(positions[:2])) + 1
    moves = (Action(HAND_OVER, (request,)), Action("step", (request,)))
    # Most tokens are not legal a second time, and a window is full only some steps later: one place would tell little.
    extra_actions = moves * draw(st.sampled_from((2, 3)))
    actions = (*session.actions[:position], *extra_actions, *session.actions[position:])
    try:
        return replace(case, session=replace(session, actions=actions))
    except Malformed:  # a draft of one request alone, in a session
        return case
