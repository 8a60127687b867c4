"""Strategies for sessions: mates of a case's request, and the actions on them all."""

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from specverify.properties.strategies.acceptance import continuation, steer_again
from specverify.properties.strategies.grammars import greedy_output
from specverify.properties.strategies.layouts import layouts
from specverify.properties.strategies.models import other_drafts
from specverify.properties.strategies.prompts import LONGEST
from specverify.properties.strategies.serving.ahead import (
    IN_STEP_INTERVAL,
    takes_ahead,
    with_early_firsts,
    with_grammar_ahead,
    with_launches,
)
from specverify.properties.strategies.serving.shared_pages import PREFIX, prefers_pages
from specverify.properties.strategies.swarm import ALL_ON, MANY_REQUESTS, TIGHT_POOLS, Swarm
from specverify.properties.strategies.trees import parents_of_size
from specverify.properties.strategies.within import admitted_values, fit_prompt
from specverify.reference.abilities import Abilities
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Draft, Ngram, Scripted, largest_tree_size, most_rows
from specverify.reference.layout import KvLayout
from specverify.reference.malformed import Malformed
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.tree import RankTree, Tree

MATES = (0, 1, 1, 2, 2, 3, 3, 3, 3)
"""Numbers of mates; three is drawn most often, and none where a request is alone in its server."""

MANY_MATES = (7, 4, 5)
"""The same for sessions of many requests."""

MOST_ACTIONS = 12
"""Most actions after the requests that enter at the start."""

MOST_FAR_ACTIONS = 3
"""The same for a case whose own prompt is long."""

# Each kind as often as it is drawn.
ACTION_KINDS = (
    "step", "step", "step", "step", "add", "add", "fork", "fork", "fork", "evict", "evict", "cancel", "cancel",
    "cancel", "preempt", "preempt", "restore", "switch", "switch", "switch", "hand-over", "hand-over", "first", "first",
)  # fmt: skip
"""Kinds of action, steps most often."""

IN_FOCUS = 4
"""In half of all sessions with mates, all but one in so many actions are of the same request, if it takes any part.

A leftover of an interruption shows at the next interruption of the same request alone.
"""

USES = {"evict": ("evict", "restore")}
"""The kinds of action that a drawn kind may add beside itself; others add only steps and entries."""

PAGED = ("paged", PREFIX, PREFIX)
"""Layouts with pages, each as often as it is drawn."""

UNPAGED_INTERVAL = 4
"""Of so many sessions that are served a step ahead, all but one have pages, as every such server has."""

SHARED = 2
"""Of so many sessions whose draft could be shared, one shares it; in the others requests must be kept apart."""

BRANCHES = Ngram(RankTree((0, 0, 0, 1), (0, 1, 0, 0)), 3)
"""An n-gram draft with a branching tree, to which requests may switch."""


def plain_drafts(within: Abilities | None) -> tuple[Draft, ...]:
    """Drafts without a model to which a request may switch; the bare root is one for every engine."""
    return (BRANCHES, Scripted()) if within is None or Ngram.TAG in within.drafts else (Scripted(),)


def switch_drafts(case: Case, within: Abilities | None) -> tuple[Draft, ...]:
    """Drafts to which requests of a session may switch: plain drafts, and the draft model of `case`.

    A request that comes back to its draft model finds none of the tokens in between in the draft's KV cache. A head is
    not among them: the target's hidden states of these tokens were not kept.
    """
    draft = case.draft
    learns = draft.model is not None and draft.reads is None
    return (*plain_drafts(within), draft) if learns and not draft.shared else plain_drafts(within)


@st.composite
def same_size_trees(draw: st.DrawFn, case: Case) -> Draft:
    """A scripted tree with as many nodes as the largest of `case` (at most 12), of any shape.

    It reveals an engine that caches something by the number of rows although it depends on the shape.
    """
    nodes = min(largest_tree_size(case.draft), 12)
    token = draw(st.lists(st.integers(0, case.model.vocab_size - 1), min_size=nodes, max_size=nodes))
    return Scripted((Tree(draw(parents_of_size(nodes)), tuple(token)),))


@st.composite
def related_prompts(draw: st.DrawFn, model: Seeded, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """A prompt related to `prompt`, as prompts in one prefix cache are.

    It continues that prompt; is the next turn of a conversation, with the answer in it; differs from the middle on or
    at one token; or holds a part of that prompt at another place, which must not be taken for a common prefix.
    """
    vocab = model.vocab_size
    new_tokens = tuple(draw(st.lists(st.integers(0, vocab - 1), max_size=6))) if draw(st.booleans()) else ()
    kinds = ("alike", "half", "moved", "own", *("talk", "parted", "parted") * 2, *("tail",) * 4)
    kind = draw(st.sampled_from(kinds))
    if kind == "alike":
        return (*prompt, *new_tokens)
    if kind == "talk":
        answer = continuation(model, prompt)
        return (*prompt, *answer[: draw(st.integers(1, len(answer)))], *new_tokens)
    position = draw(st.integers(0, len(prompt) - 1)) // (2 if kind == "tail" else 1)
    # Often the place where the prompts part is the first or the last column of a page of one, two or four columns.
    edge = draw(st.sampled_from((0, 0, position % 4, (position + 1) % 4)))
    position = max(position - edge, 0)
    if kind == "parted":
        return (*prompt[:position], (prompt[position] + 1) % vocab, *prompt[position + 1 :], *new_tokens)
    if kind == "moved":
        return (*new_tokens, *prompt)
    begin: tuple[int, ...] = ()
    if kind == "tail":
        begin = prompt[position:]
    elif kind == "half":
        begin = prompt[: len(prompt) // 2]
    return (*begin, *new_tokens) or (draw(st.integers(0, vocab - 1)),)


@st.composite
def rivals(draw: st.DrawFn, case: Case) -> Draft | None:
    """The draft of `case` on another draft model, for one in three cases with a model draft; else None.

    Requests with unlike draft models may share pages of the target, but not pages of their drafts.
    """
    target = case.model
    draft_model = case.draft.model
    if draft_model is None or draw(st.integers(0, 2)) < 2:
        return None
    assert isinstance(target, Seeded)
    assert isinstance(draft_model, Seeded)
    return case.draft.with_model(draw(other_drafts(target, draft_model)))


@st.composite
def mates(
    draw: st.DrawFn,
    case: Case,
    stranger: Case | None,
    rival: Draft | None = None,
    within: Abilities | None = None,
    earlier: tuple[Mate, ...] = (),
) -> Mate:
    """Another request on the model of `case`, with a prompt related to that of `case` or of an `earlier` mate.

    Its draft is that of `case`, that of `stranger`, or another. Without a stranger all requests have one draft, as in
    most servers; with a `rival`, half of the mates draft with it. Scripted trees are mostly steered again for the
    mate's prompt, so that as many tokens are accepted.
    """
    assert isinstance(case.model, Seeded)
    related = draw(st.sampled_from((case.prompt, *(mate.prompt for mate in earlier))))
    prompt = fit_prompt(draw(related_prompts(case.model, related)), within)
    scripted = within is None or Scripted.TAG in within.drafts
    kind = "same" if stranger is None else draw(st.sampled_from(("same", "alike", "other", "same", "alike")))
    stranger = stranger or case
    lender = draw(st.sampled_from((case, stranger)))
    draft: Draft = lender.draft
    if rival is not None and draw(st.booleans()):
        draft = rival
    elif kind != "same":
        draft = draw(same_size_trees(case) if kind == "alike" and scripted else st.sampled_from(plain_drafts(within)))
    sampling = draw(st.sampled_from((Sampling(), case.sampling, stranger.sampling)))
    # A mate has coins of its own: no tape of another request, and another seed.
    sampling = replace(sampling, tape=(), seed=draw(st.integers(0, 99)) if not sampling.greedy else 0)
    stops = Stops(draw(st.sampled_from((1, 2, 4, 8, 12, 12))))
    if draw(st.booleans()):
        stops = replace(stops, eos=case.stops.eos, stop_tokens=case.stops.stop_tokens)
    trees = draft.trees
    if trees is not None:
        if draft is lender.draft and trees and draw(st.integers(0, 3)):
            old = greedy_output(case.model, lender.prompt, lender.sampling, lender.stops)
            new = greedy_output(case.model, prompt, sampling, stops)
            trees = steer_again(trees, (lender.prompt[-1], *old), (prompt[-1], *new), case.model.vocab_size)
        draft = Scripted(tuple(tree.with_root(prompt[-1]) if not index else tree for index, tree in enumerate(trees)))
    try:
        replace(case, prompt=prompt, draft=draft, sampling=sampling, stops=stops, layout=KvLayout(), steps=0)
    except Malformed:  # the rule does not verify such trees, or the settings might ban every token
        sampling = Sampling()
    return Mate(prompt, draft, sampling, stops)


@st.composite
def second_tries(draw: st.DrawFn, inside: Sequence[int]) -> tuple[Action, ...]:
    """In two of three draws another try of all requests to enter, and mostly a step of all: others have left.

    It changes nothing for a request that is in. One that has found the pool full waits for such a moment, as in the
    queue of a scheduler.
    """
    if not inside or not draw(st.integers(0, 2)):
        return ()
    order = tuple(draw(st.permutations(inside)))
    tries = tuple(Action("add", (request,)) for request in order)
    return (*tries, Action("step", order)) if draw(st.integers(0, 2)) else tries


@st.composite
def last_entries(draw: st.DrawFn, inside: Sequence[int], within: Abilities | None) -> tuple[Action, ...]:
    """A try to enter by each request, for which others mostly make room; a step of all may come between.

    A full pool, or a fork of a request that was not in, may have left out others than those that were to enter late.
    """
    order = draw(st.permutations(inside))
    leaves = len(inside) > 1 and (within is None or "cancel" in within.actions) and draw(st.integers(0, 2))
    tries = tuple(Action("add", (request,)) for request in order)
    if not leaves:
        return tries
    # Whoever came in first takes most of the room.
    between = (*tries, Action("step", tuple(order))) if draw(st.booleans()) else ()
    return (*between, Action("cancel", (inside[0],)), *tries)


@st.composite
def evictions(draw: st.DrawFn, order: list[int], inside: Sequence[int]) -> tuple[Action, ...]:
    """An eviction of the first request of `order`, mostly with its restoration, and then mostly a step of all.

    Half of the evictions follow a step of the request at once: a pool runs out of pages when a step needs them. In some
    others enter before the request comes back.
    """
    before = (Action("step", (order[0],)),) * draw(st.integers(0, 1))
    back = (Action("restore", (order[0],)), Action("step", tuple(order)))
    others = draw(second_tries([request for request in inside if request != order[0]])) if draw(st.booleans()) else ()
    return (*before, Action("evict", (order[0],)), *others, *back[: draw(st.sampled_from((2, 1, 0, 2)))])


@st.composite
def forks(draw: st.DrawFn, source: int, twin: int) -> tuple[Action, ...]:
    """A fork of `twin` from `source`, mostly after a step of `source`; mostly both then step together."""
    before = (Action("step", (source,)),) if draw(st.integers(0, 3)) else ()
    both = (Action("step", (source, twin)),) if draw(st.integers(0, 2)) else ()
    return (*before, Action("fork", (source, twin)), *both)


@st.composite
def without_draft(draw: st.DrawFn, order: Sequence[int], within: Abilities | None) -> tuple[Action, ...]:
    """A step without their drafts by some requests of `order`; mostly a step with them follows, of the same requests.

    In half of the draws the requests were drafted and thrown back before: what was proposed then is of no use.
    """
    batch = tuple(order[: draw(st.integers(1, len(order)))])
    thrown_back = draw(st.booleans()) and (within is None or "preempt" in within.actions)
    before = (Action("preempt", batch),) if thrown_back else ()
    after = (Action("step", tuple(draw(st.permutations(batch)))),) if draw(st.integers(0, 3)) else ()
    return (*before, Action("first", batch), *after)


@st.composite
def actions(
    draw: st.DrawFn,
    count: int,
    most: int = MOST_ACTIONS,
    within: Abilities | None = None,
    bare: frozenset[int] | None = None,
    switched: frozenset[int] | None = None,
    successors: tuple[Draft, ...] | None = None,
) -> tuple[Action, ...]:
    """Actions on `count` requests: the first request enters, then up to `most` draws of an action.

    Most drawn actions are possible. A request that does not enter at the start enters later: by itself, as a fork, or
    after another is cancelled. In the end mostly all have entered. The last action is a step. Only requests of `bare`
    step without their draft, and only those of `switched` switch to a draft of `successors`; None stands for all
    requests, and for the drafts without a model.
    """
    drawn_actions = [Action("add", (0,))]
    inside = [0]
    waiting: list[int] = []
    late = draw(st.sampled_from((2, 4, 3)))  # about this many of four mates enter later
    for number in range(1, count):
        enters_later = draw(st.integers(0, 3)) < late
        (waiting if enters_later else inside).append(number)
    drawn_actions += [Action("add", (request,)) for request in inside[1:]]
    next_drafts = st.sampled_from(successors or plain_drafts(within))
    everybody = frozenset(range(count))
    focus = draw(st.integers(0, count - 1)) if count > 1 and draw(st.booleans()) else None
    takers = {"first": everybody if bare is None else bare, "switch": everybody if switched is None else switched}
    kinds = [name for name in ACTION_KINDS if within is None or {*USES.get(name, (name,))} <= {*within.actions}]
    kinds = [name for name in kinds if takers.get(name, everybody) and (count > 1 or name != "fork")]

    def enter() -> list[Action]:
        inside.extend(waiting[:1])
        return [Action("add", (waiting.pop(0),))] if waiting else []

    if draw(st.booleans()):
        drawn_actions.append(Action("step", tuple(draw(st.permutations(inside)))))
    for _ in range(draw(st.integers(1, most))):
        kind = draw(st.sampled_from(kinds))
        possible = draw(st.integers(0, 5)) > 0
        order = draw(st.permutations(inside if possible else range(count)))
        if focus in order and draw(st.integers(0, IN_FOCUS - 1)):
            order = [focus, *(request for request in order if request != focus)]
        willing = [request for request in order if request in takers.get(kind, everybody)]
        if not willing:
            kind = "step"
        # Nobody is left to enter.
        if kind == "fork" and possible and not waiting:
            kind = "step"
        if kind == "add":
            drawn_actions += enter() or draw(second_tries(order)) or [Action("add", (order[0],))]
        elif kind == "cancel":
            # The target's cache of a request that has not stepped is ahead of its draft's.
            stepped = {request for action in drawn_actions if action.kind == "step" for request in action.requests}
            unstepped = [request for request in order if request not in stepped]
            cancelled = unstepped[0] if possible and unstepped and draw(st.booleans()) else order[0]
            if cancelled in inside and len(inside) + len(waiting) > 1:
                inside.remove(cancelled)
            # The next request enters at once: a prefix cache may still hold the cancelled one's pages.
            drawn_actions += [Action("cancel", (cancelled,)), *enter(), *draw(second_tries(inside))]
        elif kind == "evict":
            drawn_actions += draw(evictions(order, inside))
        elif kind == "first":
            drawn_actions += draw(without_draft(willing, within))
        elif kind in ("step", "preempt"):
            drawn_actions.append(Action(kind, tuple(order[: draw(st.integers(1, len(order)))])))
        elif kind == "fork":
            twin = waiting.pop(0) if waiting else (order[0] + 1) % count
            inside.extend({twin} - {*inside})
            drawn_actions += draw(forks(next(request for request in order if request != twin), twin))
        elif kind == "switch":
            drawn_actions.append(Action("switch", (willing[0],), draw(next_drafts)))
        else:
            drawn_actions.append(Action(kind, (order[0],)))
    if draw(st.integers(0, 3)):
        inside += waiting
        drawn_actions += draw(last_entries(inside, within))
    return (*drawn_actions, Action("step", tuple(draw(st.permutations(inside)))))


@st.composite
def with_session(
    draw: st.DrawFn,
    case: Case,
    stranger: Case,
    kind: str | None = None,
    within: Abilities | None = None,
    swarm: Swarm = ALL_ON,
) -> Case:
    """`case` with mates, in a layout with room for all or for little more than the longest.

    The `swarm` decides whether there are up to seven of them, and whether the pool is tight.

    A request that samples switches to no other draft: its tokens depend on the draft.
    The actions decide how many requests step together.
    """
    case, stranger = (replace(drawn_case, draft=drawn_case.draft.in_batches(())) for drawn_case in (case, stranger))
    draft_lender = None if draw(st.integers(0, 2)) else stranger
    rival = draw(rivals(case))
    most_mates = within.most_requests - 1 if within is not None and within.most_requests else max(MANY_MATES)
    counts = MANY_MATES if swarm.has(MANY_REQUESTS) else MATES
    numbers = [count for count in counts if count <= most_mates] or [most_mates]
    company: tuple[Mate, ...] = ()
    for _ in range(draw(st.sampled_from(numbers))):
        company = (*company, draw(mates(case, draft_lender, rival, within, company)))
    samplings = [case.sampling, *(mate.sampling for mate in company)]
    steady = frozenset(number for number, sampling in enumerate(samplings) if sampling.greedy)
    greedy = len(steady) == len(samplings)
    # Only a hybrid's pages hold states that must be of their end.
    if kind is None and prefers_pages(case, within) and draw(st.integers(0, 2)):
        kind = PREFIX
    shared_draft = case.draft.as_shared
    # Mates mostly have the draft of the case: they then share its trie, in one session of two with tries.
    if shared_draft is not None and greedy and draw(st.integers(0, SHARED - 1)) == SHARED - 1:
        company = tuple(replace(mate, draft=shared_draft) if mate.draft == case.draft else mate for mate in company)
        case = replace(case, draft=shared_draft)
    most_actions = MOST_FAR_ACTIONS if len(case.prompt) > LONGEST else MOST_ACTIONS
    drafts = [case.draft, *(mate.draft for mate in company)]
    # A step without its draft is refused where a draft needs the texts or the batches of all steps.
    needing_all = any(draft.shared or draft.dispatch is not None for draft in drafts)
    bare = frozenset() if needing_all else frozenset(range(len(samplings)))
    successors = switch_drafts(case, within)
    session_actions = draw(actions(1 + len(company), most_actions, within, bare, steady, successors))
    # A ring's or a far prompt's case costs enough without it.
    if takes_ahead(drafts, within) and most_actions == MOST_ACTIONS and draw(st.integers(0, IN_STEP_INTERVAL - 1)) > 0:
        session_actions = draw(with_launches(session_actions, 1 + len(company), within))
        session_actions = draw(with_early_firsts(session_actions, bare, within))
        case = draw(with_grammar_ahead(case, within))
        paged_kinds = admitted_values(PAGED, within, "layouts")
        if kind is None and paged_kinds and draw(st.integers(0, UNPAGED_INTERVAL - 1)):
            kind = draw(st.sampled_from(paged_kinds))
    elif draw(st.booleans()):
        session_actions = draw(with_early_firsts(session_actions, bare, within))
    plain = replace(case, layout=KvLayout(), steps=0)
    session_case = replace(plain, session=Session(company, session_actions))
    requests = [session_case.alone(number) for number in range(1 + len(company))]
    drafts = [request.draft for request in requests] + [
        action.draft for action in session_actions if action.draft is not None
    ]
    most = max(map(most_rows, drafts))
    # A fork's prompt includes all tokens of its source, so that the sum of all lengths is the upper bound.
    # A request that is launched ahead needs room for one block more.
    extra = (
        1 + max(most, case.layout.padded_nodes)
        if session_case.session is not None and session_case.session.overlapped
        else 0
    )
    longest = sum(request.longest for request in requests) + extra
    least = max(request.longest for request in requests) + extra
    # A favoured pool mostly has no page beyond what the longest request needs, so that others wait.
    tight = TIGHT_POOLS in swarm.favours and draw(st.integers(0, 2)) > 0
    kv_layout = draw(layouts(longest, most, len(case.prompt), kind, len(requests), tight, alone=least, within=within))
    layout = replace(kv_layout, latent=case.layout.latent, stay_in_chunk=case.layout.stay_in_chunk)
    return replace(session_case, layout=layout)
