"""Strategies for sessions of a server that runs a step ahead of its host.

They draw which steps are launched, and when their results are resolved.
"""

from dataclasses import replace

from hypothesis import strategies as st

from properties.strategies.grammars import with_grammar
from reference.abilities import Abilities
from reference.architecture import Seeded
from reference.case import Case
from reference.draft import Draft
from reference.session import OVERLAPPED, Action

AHEAD = 3
"""Of so many sessions that admit it, one is served a step ahead."""

GUIDED_AHEAD = 4
"""Of so many of those whose case has no grammar, one gets it: a matcher is read at a launch and at a resolution."""


def takes_ahead(drafts: list[Draft], within: Abilities | None) -> bool:
    """Whether requests with these drafts may be launched ahead on the engine."""
    if within is not None and not {*OVERLAPPED} <= {*within.actions}:
        return False
    return not any(draft.shared or draft.dispatch is not None for draft in drafts)


@st.composite
def ahead(draw: st.DrawFn, actions: tuple[Action, ...], count: int, within: Abilities | None) -> tuple[Action, ...]:
    """`actions` on `count` requests with most steps launched, mostly in runs, and their results resolved at any time.

    Behind some launches a request is evicted and restored, if the engine does that. In the end everything in flight is
    resolved.
    """
    evicts = within is None or {"evict", "restore"} <= {*within.actions}
    found: list[Action] = []
    for action in actions:
        found.append(action)
        if action.kind != "step" or draw(st.integers(0, 5)) == 5:
            continue
        found[-1] = Action("launch", action.requests)
        for _ in range(draw(st.sampled_from((0, 1, 2, 3)))):
            if draw(st.integers(0, 2)) == 2:
                found.append(Action("resolve", (draw(st.sampled_from(action.requests)),)))
            # Mostly a part of the batch in another order, so that rows change their requests.
            order = draw(st.permutations(action.requests))
            found.append(Action("launch", tuple(order[: draw(st.sampled_from((1, 1, len(order))))])))
        happens = draw(st.sampled_from(("resolve", "lost", "lost", "rows", "rows")))
        if happens == "resolve":
            found.append(Action("resolve", (draw(st.integers(0, count - 1)),)))
        elif happens == "rows":
            # Another request takes the row of one whose step is still in flight.
            first, *others = draw(st.permutations(action.requests))
            found += [Action("launch", (one,)) for one in (first, *others[:1], first)]
        elif happens == "lost" and evicts:
            gone = draw(st.sampled_from(action.requests))
            found += [Action("evict", (gone,)), Action("restore", (gone,)), Action("launch", action.requests)]
    return (*found, *(Action("resolve", (one,)) for one in range(count) for _ in range(2)))


@st.composite
def first_early(
    draw: st.DrawFn, actions: tuple[Action, ...], bare: frozenset[int], within: Abilities | None
) -> tuple[Action, ...]:
    """`actions` with some requests of `bare` that take a first step without their draft, right behind their entry."""
    if within is not None and "first" not in within.actions:
        return actions
    found: list[Action] = []
    for action in actions:
        found.append(action)
        if action.kind == "add" and {*action.requests} <= bare and draw(st.integers(0, 3)) == 0:
            found.append(Action("first", action.requests))
    return tuple(found)


@st.composite
def guided_ahead(draw: st.DrawFn, case: Case, within: Abilities | None) -> Case:
    """`case`, in one of GUIDED_AHEAD with a grammar if the engine has any."""
    admits = within is None or "grammar" in within.processed
    if case.sampling.grammar is not None or not admits or draw(st.integers(0, GUIDED_AHEAD - 1)) < GUIDED_AHEAD - 1:
        return case
    assert isinstance(case.model, Seeded)
    sampling, stops = draw(with_grammar(case.sampling, case.stops, case.model.vocab_size))
    return replace(case, sampling=sampling, stops=stops)
