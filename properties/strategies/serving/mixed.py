"""Strategy for mixed batches: prompts of a session are filled in the forwards of steps.

Servers put chunks of a prompt into the batch of the decoding requests (vLLM's chunked prefill, SGLang's mixed chunk).
It is drawn for a session that is drawn already, so that a case without it stays the same.
"""

from dataclasses import replace

from hypothesis import strategies as st

from specverify.properties.strategies.swarm import ALL_ON, Swarm
from specverify.properties.strategies.within import ignored_settings
from specverify.reference.abilities import Abilities
from specverify.reference.case import Case
from specverify.reference.malformed import Malformed
from specverify.reference.session import Action, Roster

MIXED = 3
"""Sessions of several requests, among which one has its prompts filled beside trees."""


def takes_mixed_prefill(case: Case, within: Abilities | None) -> bool:
    """Whether the engine fills prompts beside trees, and the case has a session of several requests with steps."""
    session = case.session
    if session is None or session.continuous or not session.mates or "mixed_prefill" in ignored_settings(within):
        return False
    return any(action.kind == "step" for action in session.actions)


@st.composite
def with_mixed_prefill(draw: st.DrawFn, case: Case, swarm: Swarm = ALL_ON) -> Case:
    """`case`, or in one of MIXED the same session with prompts that are filled whole or in two or three chunks.

    As many joint steps follow behind the last action as a prompt has chunks: each request then takes a step of its own.
    """
    session = case.session
    assert session is not None
    interval = swarm.interval("mixed_prefill", MIXED)
    if draw(st.integers(0, interval - 1)) < interval - 1:
        return case
    chunks = draw(st.sampled_from((1, 2, 3)))
    longest = max(len(case.alone(number).prompt) for number in range(1 + len(session.mates)))
    roster = Roster(1 + len(session.mates))
    for action in session.actions:
        if action.kind == "fork":
            for number in roster.admitted(action)[1:]:
                roster.move("fork", number)
        else:
            roster.play(action)
    living = sorted(roster.living)
    joint_steps = (Action("step", tuple(draw(st.permutations(living)))),) * chunks if living else ()
    layout = replace(case.layout, mixed_prefill=True, prefill_chunk=-(-longest // chunks) if chunks > 1 else 0)
    try:
        return replace(case, layout=layout, session=replace(session, actions=(*session.actions, *joint_steps)))
    except Malformed:  # a text that the added steps make too long
        return case
