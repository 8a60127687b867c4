"""Strategy for the tiers of a prefix cache.

They are drawn for a session that is drawn already, so that a session without them stays the same.
"""

from dataclasses import replace

from hypothesis import strategies as st

from specverify.properties.strategies.within import ignored_settings
from specverify.reference.abilities import Abilities
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.malformed import Malformed
from specverify.reference.session import Action, Mate, Session

TIERS = ("first_tier", "second_tier")
"""The fields of a layout that are drawn here."""

ROOMS = (1, 4, 16, 64, 64, 64)
"""Rooms of the second tier, in pages; the small ones forget pages that are asked for again."""

PARTED = 3
"""Of so many sessions with a second tier, one has two prompts that part in their first page alone."""

FIRST_TIER_PAGES = (1, 1, 1, 0, 2)
"""The most pages that the first tier keeps; with few, most pages that are asked for come from the second."""


@st.composite
def with_tiers(draw: st.DrawFn, case: Case, within: Abilities | None) -> Case:
    """`case`, in three of four sessions over a prefix cache with a second tier, if the engine has one.

    Mostly requests are then evicted and restored behind one of its steps, so that they ask for the pages they left.
    """
    session = case.session
    if session is None or not case.layout.traits.keeps_prefixes or set(TIERS) & set(ignored_settings(within)):
        return case
    if draw(st.integers(0, 3)) == 0:
        return case
    first, second = draw(st.sampled_from(FIRST_TIER_PAGES)), draw(st.sampled_from(ROOMS))
    tiered = replace(case, layout=replace(case.layout, first_tier=first, second_tier=second))
    if within is not None and not {"evict", "restore"} <= {*within.actions}:
        return tiered
    steps = [index for index, action in enumerate(session.actions) if action.kind in ("step", "launch")]
    if not steps or draw(st.integers(0, 3)) == 0:
        return tiered
    position = draw(st.sampled_from(steps[:3]))
    requests = tuple(draw(st.permutations(session.actions[position].requests)))[: draw(st.sampled_from((2, 3, 1)))]
    departures = [Action(kind, (request,)) for kind in ("evict", "restore") for request in requests]
    actions = (
        *session.actions[: position + 1],
        *departures,
        Action("step", requests),
        *session.actions[position + 1 :],
    )
    return replace(tiered, session=replace(session, actions=actions))


def can_part_prompts(case: Case, within: Abilities | None) -> bool:
    """Whether two requests of `case` may part in their first page alone, over a second tier.

    Keys and values of a first layer do not depend on earlier tokens.
    """
    session, model = case.session, case.model
    if session is None or not session.mates or not case.layout.second_tier or case.ranks > 1:
        return False
    if within is not None and not {"evict", "restore"} <= {*within.actions}:
        return False
    deep = isinstance(model, Seeded) and model.architecture.layers > 1 and not model.images
    return deep and len(case.prompt) > 2 * case.layout.page_size


@st.composite
def with_parted_prompt(draw: st.DrawFn, case: Case) -> Case:
    """`case`, in one of PARTED with a first mate whose prompt is the case's but for one token in the first page.

    Both leave their pages, one after the other. The second tier then holds pages of the same tokens at the same
    places, of which the keys and values differ. The case stays as it is where its pool has too few pages.
    """
    session = case.session
    assert session is not None
    if draw(st.integers(0, PARTED - 1)) < PARTED - 1:
        return case
    position = draw(st.integers(0, case.layout.page_size - 1))
    prompt = (
        *case.prompt[:position],
        (case.prompt[position] + 1) % case.model.vocab_size,
        *case.prompt[position + 1 :],
    )
    # Another draft or adapter would own other pages, and a scored prompt is computed anew.
    settings = replace(case.sampling, prompt_logprobs=False)
    assert isinstance(case.model, Seeded)
    model = replace(case.model, adapter=None)
    mate = Mate(prompt, case.draft, replace(settings, tape=()), case.stops)
    # Pages are left by a request whose draft has read the prompt too: a draft's model reads it in the first step.
    has_columns = case.draft.has_columns
    stay = ("add", "evict") if not has_columns else ("add", "step", "evict")
    departures = [Action(kind, (request,)) for request in (0, 1) for kind in stay]
    returns = [Action("restore", (1,)), Action("step", (1,)), Action("restore", (0,)), Action("step", (0, 1))]
    # Both are inside already: the session's own entries of them would be refused.
    later = [
        action for action in session.actions if not (action.kind in ("add", "fork") and action.requests[-1] in (0, 1))
    ]
    try:
        session = Session((mate, *session.mates[1:]), (*departures, *returns, *later))
        return replace(case, model=model, sampling=settings, session=session, layout=replace(case.layout, first_tier=1))
    except Malformed:
        return case
