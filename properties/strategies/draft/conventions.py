"""Strategy for the conventions of heads: first token, alignment, and states of known pages.

All heads of a case have the same ones, as all requests of an engine do. They are drawn for a case that is drawn
already, so that a case without a head stays the same.
"""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from specverify.properties.strategies.within import admitted_values
from specverify.reference.abilities import Abilities
from specverify.reference.case import Case
from specverify.reference.draft import Draft
from specverify.reference.draft.layer_head import ALIGNMENTS, FIRST_TOKENS, LayerHead
from specverify.reference.draft.mtp import Mtp
from specverify.reference.layout import PAGE_STATES


def has_conventions(case: Case) -> bool:
    """Whether a draft of the case reads hidden states."""
    return any(draft.reads is not None for draft in _drafts(case))


@st.composite
def with_conventions(draw: st.DrawFn, case: Case, within: Abilities | None) -> Case:
    """`case` with conventions for its heads, each of those that the engine has as often as any other."""
    first_token = draw(words(FIRST_TOKENS, within, "first_tokens"))
    alignment = draw(words(ALIGNMENTS, within, "alignments"))
    if case.layout.traits.keeps_prefixes:
        page_states = draw(words(PAGE_STATES, within, "page_states"))
        case = replace(case, layout=replace(case.layout, page_states=page_states))
    return in_conventions(case, first_token, alignment, within)


def words(every: tuple[str, ...], within: Abilities | None, field: str) -> st.SearchStrategy[str]:
    """Those of `every` that the engine's abilities name in `field`."""
    return st.sampled_from(admitted_values(every, within, field) or every[:1])


def in_conventions(case: Case, first_token: str, alignment: str, within: Abilities | None = None) -> Case:
    """`case` with these conventions for all heads with rows; no request switches to a head.

    Rows of a tree are not kept where modules take turns (`Mtp`): those have the other alignment, or one module.
    """
    runs_again = ALIGNMENTS[0] in admitted_values(ALIGNMENTS, within, "alignments")

    def spoken(draft: Draft) -> Draft:
        if not isinstance(draft, LayerHead):
            return draft
        if isinstance(draft, Mtp) and draft.count > 1 and alignment == "last":
            draft = replace(draft, first_token=first_token)
            return draft if runs_again else replace(draft, count=1, alignment=alignment)
        return replace(draft, first_token=first_token, alignment=alignment)

    fields: dict[str, Any] = {"draft": spoken(case.draft)}
    session = case.session
    if session is not None:
        mates = tuple(replace(mate, draft=spoken(mate.draft)) for mate in session.mates)
        fields["session"] = replace(session, mates=mates)
    return replace(case, **fields)


def _drafts(case: Case) -> tuple[Draft, ...]:
    session = case.session
    return (case.draft, *(mate.draft for mate in (session.mates if session is not None else ())))
