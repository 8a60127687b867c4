"""Strategy for KV layouts and their settings.

It draws every kind, page sizes and orders, over-allocation (`overhang`), poison, prefills in pieces, several branch
caches of one request, pages of drafts of another size than the target's, slots for recurrent states, and columns that
are stored in eight bits.
"""

from dataclasses import replace

from hypothesis import strategies as st

from specverify.properties.strategies.prompts import LONGEST
from specverify.properties.strategies.swarm import ALL_ON, Swarm
from specverify.properties.strategies.within import admitted_values, ignored_settings
from specverify.properties.target_traits import has_recurrent_state
from specverify.reference.abilities import Abilities
from specverify.reference.case import Case
from specverify.reference.draft import Draft
from specverify.reference.kv_rounding import STATIC
from specverify.reference.layout import KINDS, KV_SCALES, LARGEST_PAGE, PLAIN, POISONS, KvLayout

SIZES = (1, 2, 3, 4, 7, 16, LARGEST_PAGE)
"""Page sizes that are drawn most often."""

FAR_SIZES = (16, 64, 7, LARGEST_PAGE)
"""Page sizes for long prompts; 2048 pages of one column would take most of the time of such a case."""

BRANCHES = (2, 3, 64)
"""Most branches at once: with few, one of them takes what is left of a wide tree."""

APART_INTERVAL = 2
"""Cases whose drafts have columns in pages, among which one has pages of drafts apart from the target's."""

DRAFT_SIZES = (1, 2, 3, 4, 5, 2, 3, 7, 16)
"""Sizes of such pages."""

STORED_INTERVAL = 5
"""Cases that may store the target's columns in eight bits, among which one does."""

STORED_SCALES = {"fp8_e4m3": (2.0**-8, 2.0**-6, 2.0**-3, 1.0), "int8": (2.0**-6, 2.0**-5, 2.0**-4)}
"""Least static scales by dtype: drawn models have keys and values of up to 6, of which the first ones cut some off."""

MOST_LISTED = 200
"""Longest free list that is drawn in an order of its own; a larger pool hands out its pages by id."""


@st.composite
def layouts(
    draw: st.DrawFn,
    longest: int,
    nodes: int,
    prompt: int,
    kind: str | None = None,
    requests: int = 1,
    tight: bool = False,
    bounded: bool = False,
    alone: int = 0,
    within: Abilities | None = None,
) -> KvLayout:
    """Layouts for `requests` requests of at most `longest` columns and `nodes` nodes, of one `kind` if given.

    Rings are more frequent where layers are `bounded` by windows or chunks; elsewhere a ring is a plain buffer. One
    of three free lists has room for all requests at once. The others have little more than the `alone` columns of the
    longest request (`longest` if 0), so that requests wait and the prefix cache must evict; `tight` ones have no more.
    """
    frequent_kinds = (("branch", "branch", "paged") if requests == 1 else ("paged", *("prefix",) * 6)) + (
        "sliding",
    ) * (2 * bounded)
    far = prompt > LONGEST
    # A ring takes a prefill in blocks of a tree's size: hundreds of forwards of a long prompt.
    kinds = admitted_values(
        (name for name in (*frequent_kinds, *KINDS) if not (far and KINDS[name].ring)), within, "layouts"
    )
    chosen_kind = kind or draw(st.sampled_from(kinds or admitted_values(KINDS, within, "layouts")))
    commits = admitted_values(KINDS[chosen_kind].commits, within, "commits") or KINDS[chosen_kind].commits
    pieces = (0, 0, prompt // 2, 256) if far else (0, 0, 1 if prompt < 16 else 7, 5, 16)
    padded = draw(st.sampled_from((0, 0, 0, nodes, nodes + 3)))
    fields: dict[str, object] = {
        "commit": draw(st.sampled_from(commits)) if len(commits) > 1 else commits[0],
        "padded_nodes": padded,
        "prefill_chunk": draw(st.sampled_from(pieces)),
        "draft_sync": draw(st.sampled_from(("keep", "keep", "refeed"))),
        "poison": draw(st.sampled_from(POISONS)),
        "kind": chosen_kind,
    }
    if KINDS[chosen_kind].pages:
        # Whole pages are reused or shared only where prompts are longer than a page.
        small = st.sampled_from((1, 2, 3, 4, 3, 1))
        any_size = st.one_of(small, st.sampled_from(SIZES), st.integers(1, LARGEST_PAGE))
        sizes = small if requests > 1 else any_size
        if far:
            sizes = st.sampled_from(FAR_SIZES)
        size = draw(sizes)
        overhang = draw(st.sampled_from((0, 0, 0, 1, size, 2 * size + 1)))
        # One column more than the engine's largest block, whichever is larger.
        beyond = max(nodes, padded) + 2 + overhang
        least, each = (-(-(columns + beyond) // size) for columns in (alone or longest, longest))
        count = draw(st.sampled_from((each * requests, each, *(least,) * 4))) + draw(st.integers(0, 3))
        count = least if tight else count
        fields |= {"page_size": size, "overhang": overhang}
        if count <= MOST_LISTED:
            fields["pages"] = tuple(draw(st.permutations(range(count))))
    for name in ignored_settings(within):
        fields.pop(name, None)
    return KvLayout(**fields)  # type: ignore[arg-type]


@st.composite
def with_draft_pages(draw: st.DrawFn, case: Case, within: Abilities | None, swarm: Swarm = ALL_ON) -> Case:
    """`case`, or in one of APART_INTERVAL whose drafts may have pages apart the same case with such pages.

    Their size is mostly another than the target's: smaller, larger, a divisor or a multiple, or neither.
    """
    interval = swarm.interval("draft_page_size", APART_INTERVAL)
    if not _may_have_draft_pages(case, within) or draw(st.integers(0, interval - 1)) < interval - 1:
        return case
    size = draw(st.sampled_from(DRAFT_SIZES))
    return replace(case, layout=replace(case.layout, draft_page_size=size))


def _may_have_draft_pages(case: Case, within: Abilities | None) -> bool:
    """Whether a draft of the case has columns in pages, and no recurrent states are kept for later requests."""
    if not case.layout.traits.pages or "draft_page_size" in ignored_settings(within):
        return False
    session = case.session
    drafts = [case.draft]
    if session is not None:
        drafts += [mate.draft for mate in session.mates]
        drafts += [action.draft for action in session.actions if action.draft is not None]
    models = (case.model, *(draft.model for draft in drafts))
    keeps_states = case.layout.traits.keeps_prefixes and any(map(has_recurrent_state, models))
    return any(draft.has_columns for draft in drafts) and not keeps_states


@st.composite
def with_branch_caches(draw: st.DrawFn, case: Case, within: Abilities | None) -> Case:
    """`case`, in every second one whose trees may branch over the layout `branch`, with several branch caches."""
    if case.layout.kind != PLAIN or not case.draft.branches or "branches" in ignored_settings(within):
        return case
    if draw(st.booleans()):
        return case
    return replace(case, layout=replace(case.layout, branches=draw(st.sampled_from(BRANCHES))))


@st.composite
def with_state_slots(draw: st.DrawFn, case: Case, within: Abilities | None) -> Case:
    """`case`, in three of four whose target or draft model has a recurrent state with slots for such states.

    Mostly there is a slot for every request; else requests wait, and take the slots of others.
    """
    if "state_slots" in ignored_settings(within) or case.spread or not _has_recurrent_states(case):
        return case
    if draw(st.integers(0, 3)) == 0:
        return case
    requests = 1 + len(case.session.mates if case.session is not None else ())
    slots = draw(st.sampled_from((requests, requests + 1, max(requests - 1, 1), min(requests, 2))))
    return replace(case, layout=replace(case.layout, state_slots=slots))


@st.composite
def with_stored_dtype(draw: st.DrawFn, case: Case, within: Abilities | None, swarm: Swarm = ALL_ON) -> Case:
    """`case`, in one of STORED_INTERVAL that may be so with its target's columns in eight bits, by any scales."""
    interval = swarm.interval("kv_dtype", STORED_INTERVAL)
    if not _may_store_codes(case, within) or draw(st.integers(0, interval - 1)) < interval - 1:
        return case
    dtype = draw(st.sampled_from(tuple(STORED_SCALES)))
    scales = draw(st.sampled_from(KV_SCALES))
    layout = replace(case.layout, kv_dtype=dtype, kv_scales=scales)
    if scales in STATIC:
        layout = replace(layout, kv_scale=draw(st.sampled_from(STORED_SCALES[dtype])))
    return replace(case, layout=layout)


def _may_store_codes(case: Case, within: Abilities | None) -> bool:
    """Whether the case admits a stored dtype, and the engine obeys it."""
    if "kv_dtype" in ignored_settings(within) or case.layout.latent or case.layout.traits.ring:
        return False
    return case.ranks == 1 and not case.model.indexed


def _has_recurrent_states(case: Case) -> bool:
    """Whether a model of the case has a recurrent state: the target, or the draft model of a request."""
    session = case.session
    mates, actions = (session.mates, session.actions) if session is not None else ((), ())
    switched = (action.draft for action in actions)
    drafts: tuple[Draft | None, ...] = (case.draft, *(mate.draft for mate in mates), *switched)
    return any(map(has_recurrent_state, (case.model, *(None if draft is None else draft.model for draft in drafts))))
