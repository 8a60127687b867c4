"""Strategy for adapters: the requests of a drawn case get one each, or none.

Scripted trees are steered again for the adapted target, so that it accepts the same nodes.
"""

from dataclasses import replace

from hypothesis import strategies as st

from specverify.properties.strategies.acceptance import continuation, steer_again
from specverify.properties.strategies.prompts import LONGEST
from specverify.reference.abilities import Abilities
from specverify.reference.adapters import ADAPTED, Adapter
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Draft, Scripted

ADAPTERS = 12
"""One case in this many has adapters where its target can have one."""

TOGETHER = 2
"""The same for a session in a layout with a prefix cache, whose pages must be kept apart by adapter."""

# Those that servers know best, more often.
SETS = (("q", "v"), ("q", "v"), ("q", "k", "v", "o"), ("gate", "up", "down"), ("k",), ("o",))
"""Projections of drawn adapters."""


@st.composite
def adapters(draw: st.DrawFn) -> Adapter:
    """Adapters whose product does not count once."""
    rank = draw(st.sampled_from((1, 2, 3, 4)))
    scale = draw(st.sampled_from((2.0, 0.5, 1.5)))
    return Adapter(rank, rank * scale, draw(st.sampled_from(SETS)), draw(st.integers(0, 9)))


def takes_adapters(case: Case, within: Abilities | None) -> bool:
    """Whether the target of `case` can have adapters, and the engine takes them; long prompts go without."""
    assert isinstance(case.model, Seeded)
    admits = case.model.architecture.family in ADAPTED and case.model.weights == "margin" and case.ranks == 1
    return admits and len(case.prompt) <= LONGEST and (within is None or within.adapters)


def adapter_interval(case: Case) -> int:
    """One case like this one in so many has adapters."""
    return TOGETHER if case.session is not None and case.layout.traits.keeps_prefixes else ADAPTERS


@st.composite
def with_adapters(draw: st.DrawFn, case: Case) -> Case:
    """`case` with an adapter for its own request or for a mate, drawn among two and none."""
    pool = (draw(adapters()), None, draw(adapters()))
    plain = case.session is None
    own_adapter = pool[0] if plain else draw(st.sampled_from(pool))
    model = case.model
    assert isinstance(model, Seeded)
    adapted_model = replace(model, adapter=own_adapter)
    if plain:
        return replace(case, model=adapted_model, draft=steer_draft(case.draft, case.prompt, model, adapted_model))
    assert case.session is not None
    mates = []
    for mate in case.session.mates:
        mate_adapter = draw(st.sampled_from(pool))
        draft = steer_draft(mate.draft, mate.prompt, model, replace(model, adapter=mate_adapter))
        mates.append(replace(mate, draft=draft, adapter=mate_adapter))
    if own_adapter is None and all(mate.adapter is None for mate in mates):
        adapted_model = replace(model, adapter=pool[0])
    draft = steer_draft(case.draft, case.prompt, model, adapted_model)
    return replace(case, model=adapted_model, draft=draft, session=replace(case.session, mates=tuple(mates)))


def steer_draft(draft: Draft, prompt: tuple[int, ...], old: Seeded, new: Seeded) -> Draft:
    """A script with its trees steered again from target `old` to target `new`; any other draft as it is."""
    if not draft.trees or old == new:
        return draft
    old_tokens, new_tokens = continuation(old, prompt), continuation(new, prompt)
    return Scripted(steer_again(draft.trees, (prompt[-1], *old_tokens), (prompt[-1], *new_tokens), old.vocab_size))
