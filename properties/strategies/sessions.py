"""Sessions: mates for a case's request, and what happens to all of them, interruptions included."""

from dataclasses import replace

from hypothesis import strategies as st

from properties.strategies.acceptance import continuation, retold
from properties.strategies.layouts import layouts
from properties.strategies.trees import as_many
from reference.architecture import Seeded
from reference.case import Case
from reference.draft import Draft, Ngram, Scripted, largest
from reference.layout import KvLayout
from reference.malformed import Malformed
from reference.sampling import Sampling, Stops
from reference.session import Action, Mate, Session
from reference.tree import RankTree, Tree

MOST_MATES = 3
MOST_ACTIONS = 12

HAPPENINGS = ("step", "step", "step", "step", "preempt", "evict", "restore", "cancel", "fork", "fork", "switch", "add")
"""Kinds of action, steps most often."""

BRANCHES = Ngram(RankTree((0, 0, 0, 1), (0, 1, 0, 0)), 3)
"""A draft to switch to."""


@st.composite
def alike(draw: st.DrawFn, case: Case) -> Draft:
    """A tree of as many nodes as the first of `case`, of any shape: what is kept by size must not be met again."""
    nodes = min(largest(case.draft), 12)
    token = draw(st.lists(st.integers(0, case.model.vocab_size - 1), min_size=nodes, max_size=nodes))
    return Scripted((Tree(draw(as_many(nodes)), tuple(token)),))


@st.composite
def mates(draw: st.DrawFn, case: Case, stranger: Case) -> Mate:
    """Another request on the model of `case`: with the draft of `stranger`, a prompt that often begins alike.

    Scripted trees are mostly told anew for its own prompt, so that it accepts what the other would have.
    """
    keep = draw(st.sampled_from((0, len(case.prompt), len(case.prompt) // 2, len(case.prompt))))
    begin = case.prompt[:keep]
    own = draw(st.lists(st.integers(0, case.model.vocab_size - 1), min_size=0 if begin else 1, max_size=6))
    # The same stretch in another place must not be taken for the same prefix.
    prompt = (*begin, *own) if draw(st.integers(0, 5)) else (*own, *begin)
    from_whom = draw(st.sampled_from((stranger, case)))
    draft: Draft = draw(
        st.one_of(st.sampled_from((from_whom.draft, from_whom.draft, BRANCHES, Scripted())), alike(case))
    )
    if isinstance(draft, Scripted):
        trees = draft.trees
        if draft is from_whom.draft and trees and draw(st.integers(0, 3)):
            assert isinstance(case.model, Seeded)
            old, new = ((*one[-1:], *continuation(case.model, one)) for one in (from_whom.prompt, prompt))
            trees = retold(trees, old, new, case.model.vocab_size)
        draft = Scripted(tuple(tree.rooted(prompt[-1]) if not at else tree for at, tree in enumerate(trees)))
    sampling = draw(st.sampled_from((Sampling(), case.sampling, stranger.sampling)))
    sampling = replace(sampling, tape=(), seed=draw(st.integers(0, 99)) if not sampling.greedy else 0)
    stops = Stops(draw(st.integers(1, 8)), case.stops.eos, case.stops.stop_tokens)
    try:
        replace(case, prompt=prompt, draft=draft, sampling=sampling, stops=stops, layout=KvLayout(), steps=0)
    except Malformed:  # its rule does not verify such trees, or it may ban every token
        sampling = Sampling()
    return Mate(prompt, draft, sampling, stops)


@st.composite
def actions(draw: st.DrawFn, count: int) -> tuple[Action, ...]:
    """What happens to `count` requests: the first enters, then anything, possible or not.

    Who does not enter at the start comes later, on its own or as a fork.
    """
    happened = [Action("add", (0,))]
    waiting = []
    for number in range(1, count):
        if draw(st.integers(0, 2)):
            happened.append(Action("add", (number,)))
        else:
            waiting.append(number)
    everyone = st.permutations(range(count))
    other: st.SearchStrategy[Draft] = st.sampled_from((BRANCHES, Scripted()))
    if draw(st.booleans()):
        happened.append(Action("step", tuple(draw(everyone))))
    for _ in range(draw(st.integers(1, MOST_ACTIONS))):
        kind = draw(st.sampled_from(HAPPENINGS))
        order = draw(everyone)
        if kind == "cancel":
            # Another one enters where the pages of the first were kept.
            happened += [Action("cancel", (order[0],)), *(Action("add", (one,)) for one in order[1:2])]
        elif kind == "evict":
            back = (Action("restore", (order[0],)), Action("step", tuple(order)))
            happened += [Action("evict", (order[0],)), *back[: draw(st.integers(0, 2))]]
        elif kind in ("step", "preempt"):
            happened.append(Action(kind, tuple(order[: draw(st.integers(1, count))])))
        elif kind == "fork":
            if count > 1:
                twin = waiting.pop(0) if waiting else order[1]
                source = next(one for one in order if one != twin)
                both = (Action("step", (source, twin)),) if draw(st.booleans()) else ()
                happened += [Action("fork", (source, twin)), *both]
        elif kind == "switch":
            happened.append(Action("switch", (order[0],), draw(other)))
        else:
            happened.append(Action(kind, (waiting.pop(0) if kind == "add" and waiting else order[0],)))
    return (*happened, Action("step", tuple(draw(everyone))))


@st.composite
def with_session(draw: st.DrawFn, case: Case, stranger: Case, kind: str | None = None) -> Case:
    """`case` with mates beside it, in a layout with room for all; drafts that sample are never switched."""
    company = tuple(draw(mates(case, stranger)) for _ in range(draw(st.integers(1, MOST_MATES))))
    greedy = case.sampling.greedy and all(mate.sampling.greedy for mate in company)
    happened = draw(actions(1 + len(company)))
    if not greedy:
        happened = tuple(one for one in happened if one.kind != "switch")
    plain = replace(case, layout=KvLayout(), steps=0)
    whole = replace(plain, session=Session(company, happened))
    alone = [whole.alone(number) for number in range(1 + len(company))]
    drafts = [one.draft for one in alone] + [one.draft for one in happened if one.draft is not None]
    most = max(map(largest, drafts))
    # A fork begins with what another request has by then.
    longest = sum(one.longest for one in alone)
    layout = draw(layouts(longest, most, len(case.prompt), kind, len(alone)))
    return replace(whole, layout=layout)
