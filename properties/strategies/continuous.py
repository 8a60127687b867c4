"""Strategy for sessions of an engine that batches by itself.

Requests arrive and are cancelled while others run. They share the draft of the case, with which such an engine is
opened. They have prompts, settings, seeds and stops of their own.
"""

from dataclasses import replace

from hypothesis import strategies as st

from specverify.properties.strategies.grammars import ended, has_tokenizer
from specverify.properties.strategies.sessions import mates
from specverify.reference.abilities import Abilities
from specverify.reference.case import Case
from specverify.reference.layout import KvLayout
from specverify.reference.malformed import Malformed
from specverify.reference.session import Action, Mate, Session

MATES = (1, 2, 3, 3, 5, 7)
"""Numbers of mates."""

PAUSES = (0, 0, 0, 1, 2, 4)
"""Steps between two arrivals."""

CANCELLED = 4
"""One request in this many is cancelled."""


@st.composite
def with_continuous_session(draw: st.DrawFn, case: Case, stranger: Case, within: Abilities) -> Case:
    """`case` with mates, of which some have the settings of `stranger`, a case on the same model."""
    case = replace(case, draft=case.draft.in_batches(()), layout=KvLayout(), steps=0)
    most = within.most_requests - 1 if within.most_requests else max(MATES)
    count = draw(st.sampled_from([count for count in MATES if count <= most]))
    company: tuple[Mate, ...] = ()
    for _ in range(count):
        company = (*company, draw(continuous_mates(case, stranger, within, company)))
    actions = draw(arrivals(1 + count, within.actions))
    # Twice the plain one: another setting costs another engine.
    setting = draw(st.sampled_from(("", "", *within.settings))) if within.settings else ""
    return replace(case, session=Session(company, actions, continuous=True, setting=setting))


@st.composite
def continuous_mates(draw: st.DrawFn, case: Case, stranger: Case, within: Abilities, earlier: tuple[Mate, ...]) -> Mate:
    """Another request with a related prompt, the settings of `case` or `stranger` or none, and the draft of `case`."""
    mate = replace(draw(mates(case, None, None, within, earlier)), draft=case.draft)
    if not draw(st.integers(0, 2)):
        foreign = replace(stranger.sampling, tape=(), seed=draw(st.integers(0, 99)))
        mate = replace(mate, sampling=foreign, stops=replace(stranger.stops, max_length=0))
    if mate.sampling.grammar is not None and has_tokenizer(within):
        mate = replace(mate, stops=ended(mate.stops, mate.sampling.grammar))
    try:
        replace(case, prompt=mate.prompt, draft=mate.draft, sampling=mate.sampling, stops=mate.stops)
    except Malformed:  # the stranger's stops or settings do not fit this prompt
        return Mate(case.prompt, case.draft, replace(case.sampling, tape=()), case.stops)
    return mate


@st.composite
def arrivals(draw: st.DrawFn, count: int, kinds: tuple[str, ...]) -> tuple[Action, ...]:
    """Actions of `kinds` by which `count` requests enter in their order, some while others run, and some are cancelled.

    A request may be cancelled before its first step, and the next then enters at once.
    """
    drawn_actions: list[Action] = []
    inside: list[int] = []
    for number in range(count):
        if inside and "step" in kinds:
            drawn_actions += [Action("step", tuple(inside))] * draw(st.sampled_from(PAUSES))
        if inside and "cancel" in kinds and not draw(st.integers(0, CANCELLED - 1)):
            drawn_actions.append(Action("cancel", (inside.pop(draw(st.integers(0, len(inside) - 1))),)))
        drawn_actions.append(Action("add", (number,)))
        inside.append(number)
    return tuple(drawn_actions)
