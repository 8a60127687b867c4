"""Strategy for pages that two requests share or take over from each other.

A twin is forked in the middle of a page, or a prompt holds the tokens of a known page in another place. Both are rare
among drawn sessions: a fork shares no page where the pool is too small or where the twin drafts with another model, and
prompts seldom hold the same tokens between the same ends of pages. Or a prompt is the next turn of a conversation,
which finds the pages of the last turn: the prefix cache of a hybrid keeps recurrent states at the ends of pages, and
that of a draft which reads hidden states keeps those. Either shows that it is of another place only where a later
request continues the text of one that went on behind a full page. The actions are drawn for a session that is drawn
already, so that a session without them stays the same.
"""

from dataclasses import replace

from hypothesis import strategies as st

from specverify.properties.strategies.acceptance import continuation
from specverify.properties.target_traits import has_recurrent_state
from specverify.reference.abilities import Abilities
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Draft, Scripted, most_rows
from specverify.reference.layout import KINDS, MOST_PAGES
from specverify.reference.malformed import Malformed
from specverify.reference.session import Action, Mate, Session

FORK_INTERVAL = 3
"""Of so many sessions whose requests draft with one model over pages, one has a fork behind the first step."""

REPEATED_PAGE_INTERVAL = 5
"""Of so many other sessions over a prefix cache, one has a mate whose prompt is the case's without its first pages."""

PREFIX = next(kind for kind, traits in KINDS.items() if traits.keeps_prefixes)
"""The layout whose pages later requests find."""

TURNS = 4
"""Of so many sessions of hybrids and heads that may have a next turn, all but one have it."""

PARTING_INTERVAL = 2
"""Of so many such next turns with a head, one parts from the text before it at the end of a page.

A row of most heads holds the token behind its column: in the last row of a known page that token is another one.
"""

SIZES = (2, 3, 2, 4)
"""Page sizes of such sessions, unless the drawn layout has larger pages: few texts end inside a page of one column."""


def can_have_fork(case: Case, within: Abilities | None) -> bool:
    """Whether a twin of the first request may share its pages, in which a draft model has columns of its own.

    Where the draft has no columns, drawn forks show whatever happens to the target's. A head has its rows as columns.
    """
    can_act = within is None or {"add", "step", "fork"} <= {*within.actions}
    drafts = case.draft.has_columns
    return can_act and drafts and can_share_pages(case)


def can_repeat_page(case: Case, within: Abilities | None) -> bool:
    """Whether a mate's prompt may begin with a page that the case's prompt holds behind its first one."""
    can_act = within is None or {"add", "step", "cancel"} <= {*within.actions}
    keeps_prefixes = case.layout.traits.keeps_prefixes
    return can_act and keeps_prefixes and can_share_pages(case) and len(case.prompt) > 2 * case.layout.page_size


def can_share_pages(case: Case) -> bool:
    """Whether the case is a session over pages whose target is whole, and whose first request has no images."""
    model = case.model
    assert isinstance(model, Seeded)
    paged = case.session is not None and bool(case.session.mates) and case.layout.traits.pages
    return paged and case.ranks == 1 and not model.images


@st.composite
def with_fork(draw: st.DrawFn, case: Case) -> Case:
    """`case`, in one of FORK_INTERVAL with a first mate that is forked from the first request behind its first step.

    Both then step in one forward, where each must write to a page of its own.
    """
    assert case.session is not None
    if draw(st.integers(0, FORK_INTERVAL - 1)) < FORK_INTERVAL - 1:
        return case
    first_actions = (Action("add", (0,)), *(Action("step", (0,)),) * draw(st.sampled_from((1, 1, 2))))
    joint_steps = (Action("step", tuple(draw(st.permutations((0, 1))))),) * 2
    prompt = (draw(st.integers(0, case.model.vocab_size - 1)),)
    return with_first_mates(case, (prompt,), (*first_actions, Action("fork", (0, 1)), *joint_steps))


@st.composite
def with_repeated_page(draw: st.DrawFn, case: Case) -> Case:
    """`case`, in one of REPEATED_PAGE_INTERVAL with a first mate whose prompt is the case's without its first pages.

    The first request leaves its pages behind before the mate enters. The tokens of its second page are those of the
    mate's first page: at other positions, behind other tokens, so that no page may serve both.
    """
    assert case.session is not None
    if draw(st.integers(0, REPEATED_PAGE_INTERVAL - 1)) < REPEATED_PAGE_INTERVAL - 1:
        return case
    size = case.layout.page_size
    # The prefix of the mate's prompt, which is all but its last token, must fill a page.
    most = (len(case.prompt) - 1) // size - 1
    prompt = case.prompt[size * draw(st.integers(1, max(most, 1))) :]
    first, second = ((Action("add", (request,)), Action("step", (request,))) for request in (0, 1))
    return with_first_mates(case, (prompt,), (*first, Action("cancel", (0,)), *second))


def with_first_mates(case: Case, prompts: tuple[tuple[int, ...], ...], first_actions: tuple[Action, ...]) -> Case:
    """`case` with first mates like its first request but for their `prompts`, and `first_actions` before all others.

    The pool has room for all, and keeps the pages of requests that are over. The case stays as it is where the mates'
    draft cannot verify such a prompt, or the pool would be too large.
    """
    session, model = case.session, case.model
    assert session is not None
    assert isinstance(model, Seeded)
    # A scored prompt takes no known pages.
    settings = replace(case.sampling, prompt_logprobs=False)
    own_settings = replace(settings, tape=())
    mates = tuple(
        Mate(prompt, _with_root(case.draft, prompt[-1]), own_settings, case.stops, adapter=model.adapter)
        for prompt in prompts
    )
    # They are inside already: the session's own entries of them would be refused.
    entries = ("add", "fork")
    later = [action for action in session.actions if not (action.kind in entries and action.requests[-1] <= len(mates))]
    try:
        session = Session((*mates, *session.mates[len(mates) :]), (*first_actions, *later))
        changed = replace(case, sampling=settings, session=session)
        return replace(changed, layout=replace(case.layout, pages=_enough_pages(changed), first_tier=0, second_tier=0))
    except Malformed:
        return case


def _with_root(draft: Draft, root: int) -> Draft:
    """`draft` with `root` as the root of its first tree, if it is a script."""
    if not draft.trees:
        return draft
    first, *others = draft.trees
    return Scripted((first.with_root(root), *others))


def _enough_pages(case: Case) -> tuple[int, ...]:
    """The free list of `case`, longer where its pages are too few for all requests; a fork begins with its source."""
    assert case.session is not None
    pages = case.layout.pages
    layout = case.layout
    requests = [case.alone(number) for number in range(1 + len(case.session.mates))]
    rows = max(layout.padded_nodes, *(most_rows(request.draft) for request in requests)) + 2
    # The columns of a twin are those of its source and its own.
    count = sum(layout.pages_for(request.longest + rows) for request in requests) + layout.pages_for(
        requests[0].longest
    )
    return (*pages, *range(len(pages), min(count, MOST_PAGES))) if pages else pages


def prefers_pages(case: Case, within: Abilities | None) -> bool:
    """Whether a session of `case` is to be drawn over a prefix cache, so that it may have a next turn."""
    can_act = within is None or (PREFIX in within.layouts and {"add", "cancel", "step"} <= {*within.actions})
    return can_act and (has_recurrent_state(case.model) or case.draft.reads is not None)


def takes_next_turn(case: Case, within: Abilities | None) -> bool:
    """Whether the session of `case` may begin with two turns of a conversation."""
    return prefers_pages(case, within) and case.layout.traits.keeps_prefixes and can_share_pages(case)


@st.composite
def with_next_turn(draw: st.DrawFn, case: Case) -> Case:
    """`case`, in all but one of TURNS with first mates that are the next turns of the first request's conversation.

    The first request takes one step or two and is cancelled. The prompt of the first mate is the turn behind that of
    the first request; where the session has two mates or more, the second is often the turn behind the first mate's.
    """
    if draw(st.integers(0, TURNS - 1)) == TURNS - 1:
        return case
    session = case.session
    assert session is not None
    size = max(case.layout.page_size, draw(st.sampled_from(SIZES)))
    case = replace(case, layout=replace(case.layout, page_size=size))
    turn = (Action("add", (0,)), *(Action("step", (0,)),) * draw(st.sampled_from((2, 1, 2))), Action("cancel", (0,)))
    prompt = draw(next_prompts(case, case.prompt))
    entry = (Action("add", (1,)), Action("step", (1,)))
    if len(session.mates) == 1 or draw(st.integers(0, 3)) == 3:
        return with_first_mates(case, (prompt,), (*turn, *entry))
    further_prompt = draw(next_prompts(case, prompt))
    further_turn = (*entry, Action("cancel", (1,)), Action("add", (2,)), Action("step", (2,)))
    return with_first_mates(case, (prompt, further_prompt), (*turn, *further_turn))


@st.composite
def next_prompts(draw: st.DrawFn, case: Case, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """The next turn behind `prompt`: what the target says, and the first token once more.

    With a head, one in PARTING_INTERVAL has another token at the end of one of the prompt's pages.
    """
    model, size = case.model, case.layout.page_size
    assert isinstance(model, Seeded)
    turn = (*prompt, *continuation(model, prompt), prompt[0])
    if case.draft.reads is None or len(prompt) <= size or draw(st.integers(1, PARTING_INTERVAL)) > 1:
        return turn
    end = size * draw(st.integers(1, (len(prompt) - 1) // size))
    return (*turn[:end], (turn[end] + 1) % model.vocab_size, *turn[end + 1 :])
