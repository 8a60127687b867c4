"""Strategies for sessions of a server that runs a step ahead of its host.

They draw which steps are launched, and when their results are resolved.
"""

from dataclasses import replace

from hypothesis import strategies as st

from specverify.properties.strategies.grammars import with_grammar
from specverify.properties.strategies.models import can_list_ids
from specverify.reference.abilities import Abilities
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Draft
from specverify.reference.session import OVERLAPPED, Action

IN_STEP_INTERVAL = 3
"""Of so many sessions that admit it, one is not served a step ahead, as vLLM and SGLang serve by default."""

BARE_INTERVAL = 2
"""Of so many sessions that admit it, one has steps that some requests take without their drafts."""

GRAMMAR_AHEAD_INTERVAL = 4
"""Of so many of those whose case has no grammar, one gets it: a matcher is read at a launch and at a resolution."""


def takes_ahead(drafts: list[Draft], within: Abilities | None) -> bool:
    """Whether requests with these drafts may be launched ahead on the engine."""
    if within is not None and not {*OVERLAPPED} <= {*within.actions}:
        return False
    return not any(draft.shared or draft.dispatch is not None for draft in drafts)


@st.composite
def with_launches(
    draw: st.DrawFn, actions: tuple[Action, ...], count: int, within: Abilities | None
) -> tuple[Action, ...]:
    """`actions` on `count` requests with most steps launched, mostly in runs, and their results resolved at any time.

    Behind some launches a request is evicted and restored, if the engine does that. In the end everything in flight is
    resolved.
    """
    evicts = within is None or {"evict", "restore"} <= {*within.actions}
    launched_actions: list[Action] = []
    for action in actions:
        launched_actions.append(action)
        if action.kind != "step" or draw(st.integers(0, 5)) == 5:
            continue
        launched_actions[-1] = Action("launch", action.requests)
        for _ in range(draw(st.sampled_from((0, 1, 2, 3)))):
            if draw(st.integers(0, 2)) == 2:
                launched_actions.append(Action("resolve", (draw(st.sampled_from(action.requests)),)))
            # Mostly a part of the batch in another order, so that rows change their requests.
            order = draw(st.permutations(action.requests))
            launched_actions.append(Action("launch", tuple(order[: draw(st.sampled_from((1, 1, len(order))))])))
        happens = draw(st.sampled_from(("resolve", "lost", "lost", "rows", "rows")))
        if happens == "resolve":
            launched_actions.append(Action("resolve", (draw(st.integers(0, count - 1)),)))
        elif happens == "rows":
            # Another request takes the row of one whose step is still in flight.
            first, *other_requests = draw(st.permutations(action.requests))
            launched_actions += [Action("launch", (request,)) for request in (first, *other_requests[:1], first)]
        elif happens == "lost" and evicts:
            evicted = draw(st.sampled_from(action.requests))
            launched_actions += [
                Action("evict", (evicted,)),
                Action("restore", (evicted,)),
                Action("launch", action.requests),
            ]
    return (*launched_actions, *(Action("resolve", (request,)) for request in range(count) for _ in range(2)))


@st.composite
def with_early_firsts(
    draw: st.DrawFn, actions: tuple[Action, ...], bare: frozenset[int], within: Abilities | None
) -> tuple[Action, ...]:
    """`actions` with some requests of `bare` that take a first step without their draft, right behind their entry."""
    if within is not None and "first" not in within.actions:
        return actions
    new_actions: list[Action] = []
    for action in actions:
        new_actions.append(action)
        if action.kind == "add" and {*action.requests} <= bare and draw(st.integers(0, 3)) == 0:
            new_actions.append(Action("first", action.requests))
    return tuple(new_actions)


def takes_bare_rows(case: Case, within: Abilities | None) -> bool:
    """Whether requests of the session may go without their drafts where others draft: no draft needs all steps."""
    session = case.session
    if session is None or session.continuous or (within is not None and not within.bare_rows):
        return False
    switched = [action.draft for action in session.actions if action.draft is not None]
    drafts = [case.draft, *(mate.draft for mate in session.mates), *switched]
    return not any(draft.shared or draft.dispatch is not None for draft in drafts)


@st.composite
def with_bare_rows(draw: st.DrawFn, case: Case) -> Case:
    """The session, in one of BARE_INTERVAL with requests that some steps and launches do not ask for a draft.

    An engine switches speculation off at any moment: where a batch is too large, a budget is spent, or nothing matches.
    """
    session = case.session
    assert session is not None
    if draw(st.integers(0, BARE_INTERVAL - 1)) < BARE_INTERVAL - 1:
        return case
    actions = []
    for action in session.actions:
        if action.kind not in ("step", "launch") or draw(st.integers(0, 2)):
            actions.append(action)
            continue
        order = draw(st.permutations(action.requests))
        actions.append(replace(action, bare=tuple(sorted(order[: draw(st.integers(1, len(order)))]))))
    return replace(case, session=replace(session, actions=tuple(actions)))


@st.composite
def with_grammar_ahead(draw: st.DrawFn, case: Case, within: Abilities | None) -> Case:
    """`case`, in one of GRAMMAR_AHEAD_INTERVAL with a grammar, if the engine has any and the vocabulary is small."""
    assert isinstance(case.model, Seeded)
    admits = can_list_ids(case.model) and (within is None or "grammar" in within.processed)
    if (
        case.sampling.grammar is not None
        or not admits
        or draw(st.integers(0, GRAMMAR_AHEAD_INTERVAL - 1)) < GRAMMAR_AHEAD_INTERVAL - 1
    ):
        return case
    sampling, stops = draw(with_grammar(case.sampling, case.stops, case.model.vocab_size))
    return replace(case, sampling=sampling, stops=stops)
