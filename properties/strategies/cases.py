"""Strategies for whole cases: model, prompt, draft, layout, sampling and stops.

Acceptance is steered, and lengths at the edges of windows, chunks and pages are drawn more often than by chance.
"""

from dataclasses import replace

from hypothesis import strategies as st

from properties.strategies.acceptance import continuation, first_law, postponed, retold
from properties.strategies.draft import any_draft
from properties.strategies.layouts import layouts
from properties.strategies.models import far_targets, targets
from properties.strategies.prompts import MARKS, far_prompts, prompts
from properties.strategies.sampling import TEMPERATURES, samplings, with_min_tokens
from properties.strategies.sessions import with_session
from properties.strategies.stops import places, stops_for
from reference.architecture import Seeded
from reference.case import Case
from reference.draft import Scripted, largest
from reference.layout import KINDS, KvLayout
from reference.sampling import Stops

LASTING = Stops(12)
"""Stops that let a request live long enough to be interrupted."""

FAR = 20
"""One case in this many has a long prompt."""


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
    """Cases of one request, on `model` if it is given.

    With `company`, the request is to get mates: drafts that keep state are more frequent, and it mostly lives long.
    With `far` the prompt ends around one of `prompts.MARKS` of at most `far` columns.
    """
    dtype = draw(st.sampled_from(dtypes))
    model = model or draw(far_targets() if far else targets())
    prompt = draw(far_prompts(model, far) if far else prompts(model))
    # Seven zeros to four temperatures: most cases are greedy.
    temperature = draw(st.sampled_from((*(0.0,) * 7, *TEMPERATURES)))
    ahead = continuation(model, prompt)
    draft = draw(any_draft(model, prompt, ahead, learning=company or temperature > 0))
    stops, least = draw(stops_for(model, prompt, places(draft, prompt[-1], ahead)))
    if company and draw(st.integers(0, 2)):
        stops, least = LASTING, 0
    # Under min_tokens greedy decoding goes on with other tokens, so that the trees are steered again.
    if least and draft.trees is not None:
        banned = postponed(model, prompt, stops, least)
        draft = Scripted(retold(draft.trees, (prompt[-1], *ahead), (prompt[-1], *banned), model.vocab_size))
    # Some rules verify chains alone.
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
    variant_interval: int = 1,
) -> Case:
    """Cases on built-in models in one of `dtypes`, two in five with a session.

    Half of the sampled cases use `processors`; all have KV layout `layout`, if it is given. One case in FAR has a
    prompt longer than attention kernels process in one piece, and two in three of those have a session. On a slow
    backend the longest prompt is divided by `variant_interval` (see `backends.base.Declaration`).
    """
    if draw(st.integers(0, FAR - 1)) == FAR - 1:
        return draw(far_cases(dtypes, processors, layout, MARKS[-1] // variant_interval))
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
    """Cases with a prompt of about 128 to `most` tokens; two in three have mates with related prompts.

    In a layout of rings, which prefill in blocks of a tree's size, prompts have about 128 tokens.
    """
    company = draw(st.integers(0, 2)) > 0
    most = min(most, MARKS[0]) if layout is not None and KINDS[layout].ring else most
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
    """`case` with mates; some of them have the draft of another case that is drawn on the same model."""
    assert isinstance(case.model, Seeded)
    return draw(with_session(case, draw(single_cases((case.dtype,), (), layout, case.model, True)), layout))
