"""Whole cases: a model, a prompt, a draft, a layout and stops, with acceptance steered and edges visited often."""

from dataclasses import replace

from hypothesis import strategies as st

from properties.strategies.acceptance import continuation, first_law, postponed, retold, steered
from properties.strategies.layouts import layouts
from properties.strategies.models import drafts, far_targets, targets
from properties.strategies.prompts import MARKS, far_prompts, prompts
from properties.strategies.sampling import TEMPERATURES, samplings, with_min_tokens
from properties.strategies.sessions import with_session
from properties.strategies.stops import places, stops_for
from properties.strategies.trees import MAX_NODES, as_many, deep_parents, parents, side_by_side
from reference.architecture import Seeded
from reference.case import Case
from reference.draft import Draft, LanguageModel, Ngram, Scripted, largest
from reference.layout import KvLayout
from reference.sampling import Stops
from reference.tree import RankTree, Shape, Tree

LASTING = Stops(12)
"""For requests that are still there when something happens to them."""

FAR = 20
"""One case in so many has a long prompt."""

STATIC_NODES = 12
"""Nodes of a static tree at most: the draft model runs each inner level of it."""


@st.composite
def scripts(draw: st.DrawFn, model: Seeded, prompt: tuple[int, ...], ahead: tuple[int, ...]) -> Scripted:
    """One to three trees, each under the root that the steps before it lead to, if the target goes on with `ahead`."""
    trees: list[Tree] = []
    root = prompt[-1]
    for step in range(draw(st.integers(1, 3))):
        through = step == 0 and draw(st.integers(0, 4)) > 2
        shapes = deep_parents() if through else parents(MAX_NODES if step == 0 else 8)
        if step > 0 and len(trees[-1]) <= 8 and draw(st.booleans()):
            shapes = as_many(len(trees[-1]))  # what is kept by the number of rows must not be met again
        one = draw(steered(root, ahead, model.vocab_size, shapes, through))
        trees.append(one.tree)
        if one.accepted + 1 > len(ahead):
            break
        root, ahead = ahead[one.accepted], ahead[one.accepted + 1 :]
    return Scripted(tuple(trees))


@st.composite
def rank_trees(draw: st.DrawFn, named: int) -> RankTree:
    """Static trees whose nodes have at most `named` children, ranks in an order of their own."""
    some = st.integers(3, 6).flatmap(as_many)
    chains = st.builds(side_by_side, st.integers(2, 3), st.integers(2, 3))
    parent = list(draw(st.one_of(parents(STATIC_NODES, shuffle=False), some, chains)))
    for node in range(1, len(parent)):
        while parent[:node].count(parent[node]) - (parent[node] == 0) >= min(named, 4):
            parent[node] += 1
    shape = Shape(tuple(parent))
    turn = draw(st.integers(0, 3))
    rank = [0] * len(parent)
    for below in shape.children:
        for at, node in enumerate(below):
            rank[node] = (at + turn) % len(below)
    return RankTree(tuple(parent), tuple(rank))


@st.composite
def vocabularies(draw: st.DrawFn, vocab: int) -> tuple[int, ...]:
    """The whole vocabulary (empty), or some of its ids, at least two."""
    if vocab < 4 or draw(st.booleans()):
        return ()
    step = draw(st.integers(2, 3))
    return tuple(sorted({*range(draw(st.integers(0, 1)), vocab, step), vocab - 1}))


@st.composite
def any_draft(
    draw: st.DrawFn, model: Seeded, prompt: tuple[int, ...], ahead: tuple[int, ...], learning: bool = False
) -> Draft:
    """Scripted trees most often, a model half of the time if `learning`; else a trie; some with their own vocabulary.

    `learning` holds where tokens may be drawn, and in sessions, where a draft's cache has most to lose.
    """
    kind = draw(st.sampled_from((0, 5, 1, 5, 4, 5) if learning else (0, 1, 2, 5, 3, 4)))
    if kind == 4:
        return Ngram(draw(rank_trees(model.vocab_size)), draw(st.integers(2, 4)))
    if kind == 5:
        vocabulary = draw(vocabularies(model.vocab_size))
        shape = draw(rank_trees(len(vocabulary) or model.vocab_size))
        return LanguageModel(draw(drafts(model)), shape, vocabulary)
    return draw(scripts(model, prompt, ahead))


@st.composite
def single_cases(
    draw: st.DrawFn,
    dtypes: tuple[str, ...],
    processors: tuple[str, ...] = (),
    layout: str | None = None,
    model: Seeded | None = None,
    company: bool = False,
    far: int = 0,
) -> Case:
    """Cases of one request, on `model` if it is given; as others in their `company` want it.

    With `far` the prompt ends around one of `prompts.MARKS` of at most `far` columns.
    """
    dtype = draw(st.sampled_from(dtypes))
    model = model or draw(far_targets() if far else targets())
    prompt = draw(far_prompts(model, far) if far else prompts(model))
    temperature = draw(st.sampled_from((*(0.0,) * 7, *TEMPERATURES)))
    ahead = continuation(model, prompt)
    draft = draw(any_draft(model, prompt, ahead, learning=company or temperature > 0))
    stops, least = draw(stops_for(model, prompt, places(draft, prompt[-1], ahead)))
    if company and draw(st.integers(0, 2)):
        stops, least = LASTING, 0
    if least and draft.trees is not None:
        banned = postponed(model, prompt, stops, least)
        draft = Scripted(retold(draft.trees, (prompt[-1], *ahead), (prompt[-1], *banned), model.vocab_size))
    if temperature > 0 and draw(st.integers(0, 3)) == 0:
        draft = draft.as_chain()
    ranked = first_law(model, prompt, temperature)
    settings = draw(samplings(model, draft, stops, temperature, processors, ranked))
    sampling = with_min_tokens(settings, least, model, stops)
    whole = Case(model, prompt, draft, KvLayout(), sampling, stops, dtype)
    bounded = any((*model.architecture.windows, *model.architecture.chunks))
    held = draw(layouts(whole.longest, largest(draft), len(prompt), layout, bounded=bounded))
    stay = any(model.architecture.chunks) and draw(st.booleans())
    return replace(whole, layout=replace(held, stay_in_chunk=stay))


@st.composite
def cases(
    draw: st.DrawFn,
    dtypes: tuple[str, ...] = ("float32", "float64"),
    processors: tuple[str, ...] = (),
    layout: str | None = None,
    rarely: int = 1,
) -> Case:
    """Cases on built-in models in one of `dtypes`, two in five with a session.

    Half of the sampled ones name `processors`; all have KV layout `layout`, if it is named. One in FAR has a long
    prompt, beyond the columns that attention kernels take in one piece, two in three of those with a session. Long
    prompts are as much shorter as the backend is slow (`rarely`, see `backends.base.Declaration`).
    """
    if draw(st.integers(0, FAR - 1)) == FAR - 1:
        return draw(far_cases(dtypes, processors, layout, MARKS[-1] // rarely))
    if draw(st.integers(0, 4)) >= 3:
        return draw(session_cases(dtypes, processors, layout))
    return draw(single_cases(dtypes, processors, layout))


@st.composite
def far_cases(
    draw: st.DrawFn,
    dtypes: tuple[str, ...] = ("float32", "float64"),
    processors: tuple[str, ...] = (),
    layout: str | None = None,
    most: int = MARKS[-1],
) -> Case:
    """Cases with a prompt of about 128 to `most` tokens; in sessions, mates of related prompts stand beside it.

    In layout `sliding`, which prefills in blocks of a tree's size, prompts have about 128 tokens.
    """
    company = draw(st.integers(0, 2)) > 0
    most = min(most, MARKS[0]) if layout == "sliding" else most
    case = draw(single_cases(dtypes, processors, layout, company=company, far=most))
    return draw(accompanied(case, layout)) if company else case


@st.composite
def session_cases(
    draw: st.DrawFn,
    dtypes: tuple[str, ...] = ("float32", "float64"),
    processors: tuple[str, ...] = (),
    layout: str | None = None,
) -> Case:
    """Cases with a session."""
    return draw(accompanied(draw(single_cases(dtypes, processors, layout, company=True)), layout))


@st.composite
def accompanied(draw: st.DrawFn, case: Case, layout: str | None = None) -> Case:
    """`case` with mates, some of which draft like another case on the same model."""
    assert isinstance(case.model, Seeded)
    return draw(with_session(case, draw(single_cases((case.dtype,), (), layout, case.model, True)), layout))
