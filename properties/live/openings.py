"""The sessions that the machine begins with: requests on one model before anything happened to them."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from hypothesis import strategies as st

from properties.strategies.cases import single_cases
from properties.strategies.layouts import layouts
from properties.strategies.sessions import mates
from reference.architecture import Seeded
from reference.case import Case
from reference.draft import Scripted, largest
from reference.layout import KvLayout
from reference.malformed import Malformed
from reference.sampling import Sampling, Stops
from reference.session import Mate, Session

MOST_MATES = 7
MOST_TOKENS = 24
"""Tokens that a request may emit: as many steps as that where nothing is accepted."""

Declines = Callable[[Case], str | None]
"""Says why a case is not taken, or None."""


def _mate(case: Case) -> Mate:
    return Mate(case.prompt, case.draft, case.sampling, case.stops)


def _longer(stops: Stops) -> st.SearchStrategy[Stops]:
    """Stops that leave time to be disturbed: another limit of length, and only now and then the others."""
    tokens = st.integers(1, MOST_TOKENS)
    free = tokens.map(Stops)
    return st.one_of(free, free, free, tokens.map(lambda most: replace(stops, max_new_tokens=most)))


def _anything(case: Case) -> str | None:
    return None


def _fitted(case: Case, declines: Declines) -> Case:
    """`case`, or what is left of it when whatever is declined is taken away: sampling, draft, stops."""
    if not declines(case):
        return case
    plain = replace(case, sampling=Sampling())
    if not declines(plain):
        return plain
    bare = replace(plain, draft=Scripted(), stops=Stops(plain.stops.max_new_tokens))
    return next((one for one in (replace(plain, stops=bare.stops), bare) if not declines(one)), bare)


@st.composite
def openings(draw: st.DrawFn, kind: str | None = None, dtype: str = "float32", declines: Declines = _anything) -> Case:
    """Sessions before anything happened: requests on one model, in KV layout `kind` if it is named.

    What `declines` has a reason against is left out of its requests.
    """
    case = draw(single_cases((dtype,), (), kind))
    case = _fitted(replace(case, layout=replace(case.layout, pages=())), declines)
    assert isinstance(case.model, Seeded)
    stranger = draw(single_cases((dtype,), (), kind, case.model))
    company = []
    unpaged = replace(case, layout=replace(case.layout, pages=()))  # drawn for one request of its own length
    for _ in range(draw(st.integers(2, MOST_MATES))):
        mate = _mate(_fitted(replace(unpaged, session=Session((draw(mates(unpaged, stranger)),))).alone(1), declines))
        company.append(replace(mate, stops=draw(_longer(mate.stops))))
    whole = replace(case, layout=KvLayout(), steps=0, session=Session(tuple(company)))
    with suppress(Malformed):  # its model draft has no room for so many
        whole = replace(whole, stops=draw(_longer(case.stops)))
    alone = [whole.alone(number) for number in range(1 + len(company))]
    longest, most = sum(one.longest for one in alone), max(largest(one.draft) for one in alone)
    return replace(whole, layout=draw(layouts(longest, most, len(case.prompt), kind, len(alone))))
