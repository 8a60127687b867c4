"""Strategy for the tiers of a prefix cache.

They are drawn for a session that is drawn already, so that a session without them stays the same.
"""

from dataclasses import replace

from hypothesis import strategies as st

from properties.strategies.within import set_aside
from reference.abilities import Abilities
from reference.case import Case
from reference.session import Action

TIERS = ("first_tier", "second_tier")
"""The fields of a layout that are drawn here."""

ROOMS = (1, 4, 16, 64, 64, 64)
"""Rooms of the second tier, in pages; the small ones forget pages that are asked for again."""

KEPT = (1, 1, 1, 0, 2)
"""The most pages that the first tier keeps; with few, most pages that are asked for come from the second."""


@st.composite
def in_tiers(draw: st.DrawFn, case: Case, within: Abilities | None) -> Case:
    """`case`, in three of four sessions over a prefix cache with a second tier, if the engine has one.

    Mostly requests are then evicted and restored behind one of its steps, so that they ask for the pages they left.
    """
    session = case.session
    if session is None or not case.layout.traits.keeps_prefixes or set(TIERS) & set(set_aside(within)):
        return case
    if draw(st.integers(0, 3)) == 0:
        return case
    first, second = draw(st.sampled_from(KEPT)), draw(st.sampled_from(ROOMS))
    tiered = replace(case, layout=replace(case.layout, first_tier=first, second_tier=second))
    if within is not None and not {"evict", "restore"} <= {*within.actions}:
        return tiered
    steps = [at for at, action in enumerate(session.actions) if action.kind in ("step", "launch")]
    if not steps or draw(st.integers(0, 3)) == 0:
        return tiered
    at = draw(st.sampled_from(steps[:3]))
    gone = tuple(draw(st.permutations(session.actions[at].requests)))[: draw(st.sampled_from((2, 3, 1)))]
    left = [Action(kind, (one,)) for kind in ("evict", "restore") for one in gone]
    happened = (*session.actions[: at + 1], *left, Action("step", gone), *session.actions[at + 1 :])
    return replace(tiered, session=replace(session, actions=happened))
