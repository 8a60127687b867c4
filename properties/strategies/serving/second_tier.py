"""Strategy for the tiers of a prefix cache.

They are drawn for a session that is drawn already, so that a session without them stays the same.
"""

from dataclasses import replace

from hypothesis import strategies as st

from properties.strategies.within import set_aside
from reference.abilities import Abilities
from reference.case import Case
from reference.draft import Scripted
from reference.malformed import Malformed
from reference.session import Action, Session

TIERS = ("first_tier", "second_tier")
"""The fields of a layout that are drawn here."""

ROOMS = (1, 4, 16, 64, 64, 64)
"""Rooms of the second tier, in pages; the small ones forget pages that are asked for again."""

PARTED = 3
"""Of so many sessions with a second tier, one has two prompts that part in their first page alone."""

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
    if takes_parted(tiered) and draw(st.integers(0, PARTED - 1)) == PARTED - 1:
        return parted(tiered, draw(st.integers(0, tiered.layout.page_size - 1)))
    steps = [at for at, action in enumerate(session.actions) if action.kind in ("step", "launch")]
    if not steps or draw(st.integers(0, 3)) == 0:
        return tiered
    at = draw(st.sampled_from(steps[:3]))
    gone = tuple(draw(st.permutations(session.actions[at].requests)))[: draw(st.sampled_from((2, 3, 1)))]
    left = [Action(kind, (one,)) for kind in ("evict", "restore") for one in gone]
    happened = (*session.actions[: at + 1], *left, Action("step", gone), *session.actions[at + 1 :])
    return replace(tiered, session=replace(session, actions=happened))


def takes_parted(case: Case) -> bool:
    """Whether the prompt of `case` has a full second page, which can be alike behind another first page."""
    return len(case.prompt) > 2 * case.layout.page_size


def parted(case: Case, at: int) -> Case:
    """`case` whose first mate has the case's prompt but for token `at`; both leave their pages, one after the other.

    The second tier then holds pages of the same tokens at the same places, of which the keys and values differ. The
    case stays as it is where its pool has too few pages for the mate's new prompt.
    """
    session = case.session
    assert session is not None
    prompt, first = case.prompt, session.mates[0]
    prompt = (*prompt[:at], (prompt[at] + 1) % case.model.vocab_size, *prompt[at + 1 :])
    trees = first.draft.trees
    draft = first.draft if not trees else Scripted((trees[0].rooted(prompt[-1]), *trees[1:]))
    before = [Action(kind, (one,)) for one in (0, 1) for kind in ("add", "step", "evict")]
    back = [Action("restore", (1,)), Action("step", (1,)), Action("restore", (0,)), Action("step", (0, 1))]
    # Both are inside already: the session's own entries of them would be refused.
    later = [one for one in session.actions if not (one.kind in ("add", "fork") and one.requests[-1] in (0, 1))]
    mates = (replace(first, prompt=prompt, draft=draft), *session.mates[1:])
    try:
        return replace(case, session=Session(mates, (*before, *back, *later)))
    except Malformed:
        return case
