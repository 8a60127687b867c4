"""Strategy for the next turn of a conversation.

Its prompt finds the pages of the last turn. The prefix cache of a hybrid keeps recurrent states at the ends of pages. A
state shows that it is of another place only where a later request continues the text of one that went on behind a full
page.
"""

from dataclasses import replace

from hypothesis import strategies as st

from specverify.properties.strategies.acceptance import continuation
from specverify.properties.strategies.serving.shared_pages import can_share_pages, with_first_mate
from specverify.reference.abilities import Abilities
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.layout import KINDS
from specverify.reference.session import Action

PREFIX = next(kind for kind, traits in KINDS.items() if traits.keeps_prefixes)
"""The layout whose pages later requests find."""

TURNS = 4
"""Of so many sessions of hybrids that may have a next turn, all but one have it."""

SIZES = (2, 3, 2, 4)
"""Page sizes of such sessions, unless the drawn layout has larger pages: few texts end inside a page of one column."""


def prefers_pages(case: Case, within: Abilities | None) -> bool:
    """Whether a session of `case` is to be drawn over a prefix cache, so that it may have a next turn."""
    # No page holds the hidden states that a draft reads.
    can_act = within is None or (PREFIX in within.layouts and {"add", "cancel", "step"} <= {*within.actions})
    return can_act and _is_hybrid(case) and case.draft.reads is None


def _is_hybrid(case: Case) -> bool:
    return isinstance(case.model, Seeded) and bool(case.model.architecture.recurrent)


def takes_next_turn(case: Case, within: Abilities | None) -> bool:
    """Whether the session of `case` may begin with two turns of a conversation."""
    return prefers_pages(case, within) and case.layout.traits.keeps_prefixes and can_share_pages(case)


@st.composite
def with_next_turn(draw: st.DrawFn, case: Case) -> Case:
    """`case`, in all but one of TURNS with a first mate that is the next turn of the first request's conversation.

    The first request takes one step or two and is cancelled. The mate's prompt is that of the first request, with what
    the target says after it, and the first token of the prompt once more.
    """
    if draw(st.integers(0, TURNS - 1)) == TURNS - 1:
        return case
    size = max(case.layout.page_size, draw(st.sampled_from(SIZES)))
    case = replace(case, layout=replace(case.layout, page_size=size))
    assert isinstance(case.model, Seeded)
    prompt = (*case.prompt, *continuation(case.model, case.prompt), case.prompt[0])
    turn = (Action("add", (0,)), *(Action("step", (0,)),) * draw(st.sampled_from((2, 1, 2))), Action("cancel", (0,)))
    return with_first_mate(case, prompt, (*turn, Action("add", (1,)), Action("step", (1,))))
