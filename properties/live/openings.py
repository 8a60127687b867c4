"""The strategy of sessions with which the state machine begins.

All requests run on one model, and no action has happened yet.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from hypothesis import strategies as st

from specverify.properties.strategies.cases import single_cases
from specverify.properties.strategies.layouts import layouts
from specverify.properties.strategies.serving.branch_caches import with_branch_caches
from specverify.properties.strategies.serving.second_tier import with_tiers
from specverify.properties.strategies.sessions import mates
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Scripted, most_rows
from specverify.reference.layout import KvLayout
from specverify.reference.malformed import Malformed
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.session import Mate, Session

MOST_MATES = 7
MOST_TOKENS = 24
"""Largest number of tokens that a request emits; it takes as many steps if no draft token is accepted."""

Declines = Callable[[Case], str | None]
"""Returns the backend's reason against a case, or None if the backend takes the case."""


def _mate(case: Case) -> Mate:
    return Mate(case.prompt, case.draft, case.sampling, case.stops)


def _long_stops(stops: Stops) -> st.SearchStrategy[Stops]:
    """Stops that let a request live long enough to be interrupted.

    Three in four have a limit of length alone; the others keep the end tokens and strings of `stops`.
    """
    tokens = st.integers(1, MOST_TOKENS)
    free = tokens.map(Stops)
    return st.one_of(free, free, free, tokens.map(lambda count: replace(stops, max_new_tokens=count)))


def _no_reason(case: Case) -> str | None:
    return None


def _fit(case: Case, declines: Declines) -> Case:
    """`case`, or a plainer case that is not declined: without sampling, then also without stops and draft."""
    if not declines(case):
        return case
    plain = replace(case, sampling=Sampling())
    if not declines(plain):
        return plain
    bare = replace(plain, draft=Scripted(), stops=Stops(plain.stops.max_new_tokens))
    return next((candidate for candidate in (replace(plain, stops=bare.stops), bare) if not declines(candidate)), bare)


@st.composite
def openings(draw: st.DrawFn, kind: str | None = None, dtype: str = "float32", declines: Declines = _no_reason) -> Case:
    """Sessions without actions: requests on one model, in KV layout `kind` if given.

    Settings that `declines` has a reason against are left out of the requests.
    """
    case = draw(single_cases((dtype,), (), kind))
    draft = case.draft.in_batches(())  # the actions will decide how many requests step together
    case = _fit(replace(case, draft=draft, layout=replace(case.layout, pages=())), declines)
    assert isinstance(case.model, Seeded)
    # A second case on the same model lends its draft and its sampling to some mates.
    stranger = draw(single_cases((dtype,), (), kind, case.model))
    stranger = replace(stranger, draft=stranger.draft.in_batches(()))
    company = []
    unpaged = replace(case, layout=replace(case.layout, pages=()))  # drawn for one request of its own length
    for _ in range(draw(st.integers(2, MOST_MATES))):
        mate = _mate(_fit(replace(unpaged, session=Session((draw(mates(unpaged, stranger)),))).alone(1), declines))
        company.append(replace(mate, stops=draw(_long_stops(mate.stops))))
    opening = replace(case, layout=KvLayout(), steps=0, session=Session(tuple(company)))
    with suppress(Malformed):  # the draft model may not have enough positions for more tokens
        opening = replace(opening, stops=draw(_long_stops(case.stops)))
    # A fork's prompt includes another request's tokens, so that the sum of all lengths is the upper bound.
    requests = [opening.alone(number) for number in range(1 + len(company))]
    longest = sum(request.longest for request in requests)
    most = max(most_rows(request.draft) for request in requests)
    opening = replace(opening, layout=draw(layouts(longest, most, len(case.prompt), kind, len(requests))))
    for draw_layout in (with_tiers, with_branch_caches):
        candidate = draw(draw_layout(opening, None))
        opening = opening if declines(candidate) else candidate
    return opening
