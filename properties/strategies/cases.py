"""Strategies for whole cases: model, prompt, draft, layout, sampling and stops.

Acceptance is steered, and lengths at the edges of windows, chunks and pages are drawn more often than by chance. What a
`with_` strategy adds is drawn for a case that is drawn already, so that a case without it stays the same.
"""

from dataclasses import replace
from functools import cache

from hypothesis import assume
from hypothesis import strategies as st

from specverify.properties.strategies.acceptance import (
    continuation,
    first_law,
    output_under_min_tokens,
    steer_again,
    with_rejected_row,
)
from specverify.properties.strategies.continuous import with_continuous_session
from specverify.properties.strategies.draft import any_draft
from specverify.properties.strategies.draft.conventions import has_conventions, with_conventions
from specverify.properties.strategies.grammars import has_tokenizer, output_under_grammar, with_grammar, with_marker
from specverify.properties.strategies.layouts import (
    layouts,
    with_branch_caches,
    with_draft_pages,
    with_state_slots,
    with_stored_dtype,
)
from specverify.properties.strategies.models import (
    LARGEST_SAMPLED,
    can_list_ids,
    far_architectures,
    far_targets,
    swarm_targets,
)
from specverify.properties.strategies.prompts import LONGEST, MARKS, far_prompts, prompts
from specverify.properties.strategies.sampling import TEMPERATURES, samplings, with_min_tokens
from specverify.properties.strategies.serving.adapters import adapter_interval, takes_adapters, with_adapters
from specverify.properties.strategies.serving.ahead import takes_bare_rows, with_bare_rows
from specverify.properties.strategies.serving.images import image_interval, image_targets, with_images
from specverify.properties.strategies.serving.mixed import takes_mixed_prefill, with_mixed_prefill
from specverify.properties.strategies.serving.moved import takes_hand_over, with_hand_overs
from specverify.properties.strategies.serving.second_tier import can_part_prompts, with_parted_prompt, with_tiers
from specverify.properties.strategies.serving.shared_pages import (
    can_have_fork,
    can_repeat_page,
    takes_next_turn,
    with_fork,
    with_next_turn,
    with_repeated_page,
)
from specverify.properties.strategies.sessions import with_session
from specverify.properties.strategies.stops import places, stops_for
from specverify.properties.strategies.swarm import (
    ADAPTERS,
    ALL_ON,
    GRAMMARS,
    IMAGES,
    LARGE_TREES,
    LONG_OUTPUTS,
    LONG_PROMPTS,
    PROMPT_SCORES,
    QUANTISED_TARGETS,
    SESSIONS,
    SHARES,
    Swarm,
)
from specverify.properties.strategies.within import SPARE, admitted_values, fit_draft, fit_prompt, ignored_settings
from specverify.properties.target_traits import has_recurrent_state
from specverify.reference.abilities import Abilities
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Scripted, largest_tree_size, most_rows
from specverify.reference.layout import KINDS, KvLayout
from specverify.reference.malformed import Malformed
from specverify.reference.parallel import RANKS, draft_refusal, sharding_refusal
from specverify.reference.quantisation import QUANTISED
from specverify.reference.rules import RULES
from specverify.reference.sampling import Stops

LASTING_STOPS = Stops(12)
"""Stops that let a request live long enough to be interrupted."""

LONG_STOPS = Stops(64)
"""Stops of long outputs, in which blocks, pages and windows are passed many times."""

LONG_OUTPUT_NODES = 16
"""Most nodes of a tree that is verified in each step of a long output; a larger one takes minutes."""

GREEDY = 7
"""Zeros among which the temperatures are drawn, four of them in full: most cases are greedy."""

GUIDED = 5
"""Share of cases with processed logits that have a grammar in place of bans: 1 in this many, some 1 in 25 of all.

An engine that reads words from a tokenizer has no bans and few settings: there it is that share of all cases.
"""

LATENT = 8
"""Of so many cases on a model with latent attention, all but one hold latent rows."""

RANKED = 12
"""One greedy case in this many is sharded over ranks where its target can be, a sampled one three times as often."""

BIASED = 2
"""The same for a single request on a target whose output projections have biases, which only one rank may add."""

WEIGHTED = 3
"""The same for cases whose draft has weights, which ranks share too: one in this many is sharded."""

DRAFT_RANKED = 3
"""Of so many cases with a sharded target, all but one have their drafts on ranks of their own."""

SPREAD = 4
"""One session in this many of those that can be is spread over ranks."""

FAR_ON_RANKS = 512
"""Prompts of more tokens stay on one rank, since every rank prefills them."""

FAR = 20
"""One case in this many has a long prompt."""

HALVES = ("bfloat16", "float16")
"""Dtypes of 16 bits."""

HALVES_SHARE = 8
"""One case in this many is in 16 bits, on an engine that also computes in float64.

Wrong logic shows in float32 and float64 at a tenth of a per mille of what 16 bits need; code that runs in 16 bits
alone shows there alone.
"""

PADDED = 8
"""One case of a single request in this many has its prompt padded on the left."""

PADDED_TOGETHER = 4
"""The same for sessions, whose requests have unequal lengths."""

FRONTS = (1, 2, 5)
"""Dead columns in front of the longest request."""

QUANTISED_INTERVAL = 8
"""One case in this many is on a target with quantised projections, where the engine and the case may have them."""

SCORE_INTERVAL = 16
"""One case in this many asks for the log-probabilities of prompts."""

SCORED_TOGETHER = 3
"""The same for a session in a layout with a prefix cache, whose pages hold no logits."""


@cache
def working_dtypes(dtypes: tuple[str, ...]) -> st.SearchStrategy[str]:
    """One of `dtypes`: if float64 is among them, 16 bits in one case of HALVES_SHARE; else each equally often."""
    wide = tuple(dtype for dtype in dtypes if dtype not in HALVES)
    halves = tuple(dtype for dtype in dtypes if dtype in HALVES)
    if "float64" not in wide or not halves:
        return st.sampled_from(dtypes)
    # Both parts are repeated so often that their sizes stand as HALVES_SHARE - 1 to 1.
    return st.sampled_from(wide * (len(halves) * (HALVES_SHARE - 1)) + halves * len(wide))


@st.composite
def single_cases(
    draw: st.DrawFn,
    dtypes: tuple[str, ...],
    processors: tuple[str, ...] = (),
    layout: str | None = None,
    model: Seeded | None = None,
    company: bool = False,
    far: int = 0,
    within: Abilities | None = None,
    sampled: bool = False,
    swarm: Swarm = ALL_ON,
) -> Case:
    """Cases of one request, on `model` if it is given; `sampled` leaves out those that decode greedily.

    With `company`, the request is to get mates: drafts that keep state are more frequent, and it mostly lives long.
    With `far` the prompt ends around one of `prompts.MARKS` of at most `far` columns. The `swarm` decides traits and
    sizes of the target, and sizes of trees and outputs.
    """
    dtype = draw(working_dtypes(dtypes))
    model = model or draw(far_targets(within, swarm.traits) if far else swarm_targets(within, dtype, swarm))
    prompt = fit_prompt(draw(far_prompts(model, far) if far else prompts(model)), within)
    # No zeros where sampling alone is under test, by the run's wish or because the engine has no greedy decoding.
    zeros = GREEDY if not sampled and (within is None or within.greedy) else 0
    # The exact laws of a session's rows over 151,936 ids take a minute.
    above_zero = temperatures(within) if model.vocab_size <= LARGEST_SAMPLED or not zeros else ()
    temperature = draw(st.sampled_from((*(0.0,) * zeros, *above_zero)))
    ahead = continuation(model, prompt)
    # A row of a large vocabulary takes a megabyte: such cases have few rows.
    large_trees = swarm.has(LARGE_TREES) and not far and can_list_ids(model)
    learning = company or temperature > 0
    draft = fit_draft(draw(any_draft(model, prompt, ahead, learning, within, large_trees, swarm)), within)
    # An engine with a draft of its own may accept a block anywhere.
    positions = places(draft, prompt[-1], ahead) if draft.shapes else tuple(range(len(ahead)))
    stops, least = draw(stops_for(model, prompt, positions, within))
    if company and draw(st.integers(0, 2)):
        stops = LASTING_STOPS
        least = 0
    elif swarm.has(LONG_OUTPUTS) and not far and can_list_ids(model) and largest_tree_size(draft) <= LONG_OUTPUT_NODES:
        stops = LONG_STOPS
        least = 0
    # Under min_tokens greedy decoding goes on with other tokens, so that the trees are steered again.
    if least and draft.trees is not None:
        banned = output_under_min_tokens(model, prompt, stops, least)
        draft = Scripted(steer_again(draft.trees, (prompt[-1], *ahead), (prompt[-1], *banned), model.vocab_size))
    # Some rules verify chains alone.
    if temperature > 0 and (chains_only(within) or draw(st.integers(0, 2)) == 0):
        draft = draft.as_chain()
    ranked = first_law(model, prompt, temperature)
    settings = draw(samplings(model, draft, stops, temperature, processors, ranked, within))
    sampling = with_min_tokens(settings, least, model, stops)
    grammars_alone = within is not None and {*within.processed} <= {"grammar", "grammar_markers"}
    admits = sampling.processes or grammars_alone or has_tokenizer(within) or GRAMMARS in swarm.favours
    admits = admits and can_list_ids(model) and (within is None or "grammar" in within.processed)
    guided = swarm.interval(GRAMMARS, GUIDED)
    if admits and draw(st.integers(0, guided - 1)) == guided - 1:
        sampling, stops = draw(with_grammar(sampling, stops, model.vocab_size, within))
        if within is None or "grammar_markers" in within.processed:
            sampling = draw(with_marker(sampling, stops, model, prompt))
        if sampling.grammar is not None and draft.trees is not None:
            legal = output_under_grammar(model, prompt, sampling, stops)
            draft = Scripted(steer_again(draft.trees, (prompt[-1], *ahead), (prompt[-1], *legal), model.vocab_size))
    latent = model.architecture.settings.latent_rank > 0 and "latent" not in ignored_settings(within)
    latent = latent and draw(st.integers(0, LATENT - 1)) > 0
    branching = within is None or within.trees != "chains"
    if latent and sampling.greedy and branching and draft.trees and draw(st.integers(0, 2)):
        draft = Scripted(with_rejected_row(draft.trees, ahead, model.vocab_size))
    plain_case = Case(model, prompt, draft, KvLayout(), sampling, stops, dtype)
    bounded = any((*model.architecture.windows, *model.architecture.chunks))
    kv_layout = draw(layouts(plain_case.longest, most_rows(draft), len(prompt), layout, bounded=bounded, within=within))
    stays = any(model.architecture.chunks) and "stay_in_chunk" not in ignored_settings(within)
    stay = stays and draw(st.integers(0, 3)) > 0
    return replace(plain_case, layout=replace(kv_layout, stay_in_chunk=stay, latent=latent))


@st.composite
def cases(
    draw: st.DrawFn,
    dtypes: tuple[str, ...] = ("float32", "float64"),
    processors: tuple[str, ...] = (),
    layout: str | None = None,
    variant_interval: int = 1,
    within: Abilities | None = None,
    sampled: bool = False,
    swarm: Swarm = ALL_ON,
) -> Case:
    """Cases on built-in models in one of `dtypes`, two in five with a session; all lie `within` an engine's abilities.

    Half of the sampled cases use `processors`; all have KV layout `layout`, if it is given. One case in FAR has a
    prompt longer than attention kernels process in one piece, and two in three of those have a session. On a slow
    backend the longest prompt is divided by `variant_interval` (see `specverify.backends.base.Declaration`). With
    `sampled` every case is one request that samples, with a prompt of the usual length. What the `swarm` switches off
    is not drawn, unless something that is drawn needs it.
    """
    engine, within = within, swarm.within or within
    max_prompt = longest_far_prompt(MARKS[-1] // variant_interval, within)
    far = swarm.interval(LONG_PROMPTS, FAR)
    if sampled:
        case = draw(single_cases(dtypes, processors, layout, within=within, sampled=True, swarm=swarm))
    elif max_prompt and draw(st.integers(0, far - 1)) == far - 1:
        case = draw(far_cases(dtypes, processors, layout, max_prompt, within, swarm))
    elif can_play_sessions(within) and draw(st.integers(0, 4)) >= (1 if SESSIONS in swarm.favours else 3):
        case = draw(session_cases(dtypes, processors, layout, within, swarm))
    else:
        case = draw(single_cases(dtypes, processors, layout, within=within, swarm=swarm))
    interval = swarm.interval(SHARES, _rank_interval(case))
    spread = swarm.interval(SHARES, SPREAD)
    if draw(st.integers(0, interval - 1)) == interval - 1 or (within is not None and 1 not in within.ranks):
        case = draw(with_ranks(case, within))
    elif case.session is not None and _can_spread(case, within) and draw(st.integers(0, spread - 1)) == spread - 1:
        rank_counts = [ranks for ranks in admitted_values(RANKS, within, "ranks") if ranks > 1]
        case = _spread(case, draw(st.sampled_from(rank_counts)))
    if takes_adapters(case, within):
        rate = swarm.interval(ADAPTERS, adapter_interval(case))
        case = draw(with_adapters(case)) if draw(st.integers(0, rate - 1)) == rate - 1 else case
    architectures = image_targets(case, within)
    if architectures:
        rate = swarm.interval(IMAGES, image_interval(case))
        case = draw(with_images(case, architectures, within)) if draw(st.integers(0, rate - 1)) == rate - 1 else case
    case = draw(with_branch_caches(case, within))
    if takes_scores(case, within):
        rate = swarm.interval(PROMPT_SCORES, score_interval(case))
        case = draw(with_scores(case)) if draw(st.integers(0, rate - 1)) == rate - 1 else case
    case = draw(with_left_padding(case, within, swarm))
    case = draw(with_hand_overs(case)) if takes_hand_over(case, within) else case
    case = draw(with_fork(case)) if can_have_fork(case, within) else case
    if takes_next_turn(case, within):
        case = draw(with_next_turn(case))
    else:
        case = draw(with_repeated_page(case)) if can_repeat_page(case, within) else case
    case = draw(with_parted_prompt(case)) if can_part_prompts(case, within) else case
    case = draw(with_conventions(case, within)) if has_conventions(case) else case
    case = draw(with_quantised_target(case, swarm)) if takes_quantised_target(case, within) else case
    case = draw(with_mixed_prefill(case, swarm)) if takes_mixed_prefill(case, within) else case
    case = draw(with_draft_pages(case, within, swarm))
    case = draw(with_bare_rows(case)) if takes_bare_rows(case, within) else case
    case = draw(with_state_slots(case, within))
    case = draw(with_stored_dtype(case, within, swarm))
    case = draw(with_draft_ranks(case, within))
    # A session may grow longer than an engine takes, by a prompt that continues another; such a draw is repeated.
    assume(engine is None or engine.outside(case) is None)
    return case


@st.composite
def with_ranks(draw: st.DrawFn, case: Case, within: Abilities | None) -> Case:
    """`case` with its target sharded, if its heads can be shared out; the longest prompts stay on one rank.

    Of the sessions that can be, half have their requests spread over ranks instead, and all whose target stays whole.
    """
    assert isinstance(case.model, Seeded)
    if len(case.prompt) > FAR_ON_RANKS:
        return case
    rank_counts = [ranks for ranks in admitted_values(RANKS, within, "ranks") if ranks > 1]
    shardable_counts = [ranks for ranks in rank_counts if sharding_refusal(case.model.architecture, ranks) is None]
    if case.session is not None and _can_spread(case, within):
        ranks = draw(st.sampled_from((*rank_counts, rank_counts[-1])))
        if ranks not in shardable_counts or draw(st.booleans()):
            return _spread(case, ranks)
    # Few targets can be shared out among the most ranks: where that is possible it is likelier.
    counts = (*shardable_counts, *shardable_counts[-1:] * 2)
    return replace(case, ranks=draw(st.sampled_from(counts))) if counts else case


@st.composite
def with_draft_ranks(draw: st.DrawFn, case: Case, within: Abilities | None) -> Case:
    """`case`, in all but one of DRAFT_RANKED with a sharded target with its drafts on some of the ranks alone."""
    if case.ranks == 1 or case.spread or (within is not None and not within.draft_ranks):
        return case
    counts = [ranks for ranks in RANKS if _can_draft_on(case, ranks)]
    if not counts or draw(st.integers(0, DRAFT_RANKED - 1)) == DRAFT_RANKED - 1:
        return case
    # Few drafts can be shared out, fewer still among some of the ranks: where that is possible it is likelier.
    several = [ranks for ranks in counts if ranks > 1]
    some = [ranks for ranks in several if ranks < case.ranks]
    return replace(case, draft_ranks=draw(st.sampled_from((*counts, *several, *some))))


def _can_draft_on(case: Case, ranks: int) -> bool:
    """Whether the drafts of all requests can run on so many ranks, of which drafts without weights use one alone.

    No prefix cache keeps recurrent states of such drafts.
    """
    session = case.session
    drafts = [case.draft]
    if session is not None:
        drafts += [mate.draft for mate in session.mates]
        drafts += [action.draft for action in session.actions if action.draft is not None]
    if case.layout.traits.keeps_prefixes and any(has_recurrent_state(draft.model) for draft in drafts):
        return False
    if ranks > case.ranks or (ranks > 1 and not any(draft.has_weights for draft in drafts)):
        return False
    return all(draft_refusal(draft, ranks) is None for draft in drafts)


def _rank_interval(case: Case) -> int:
    """Of so many cases like this one, one is sharded over ranks."""
    assert isinstance(case.model, Seeded)
    if case.model.architecture.output_bias and case.session is None:
        return BIASED
    if case.draft.has_weights:
        return WEIGHTED
    return RANKED if case.sampling.greedy else RANKED // 3


def _can_spread(case: Case, within: Abilities | None) -> bool:
    """Whether the requests of the session can be spread over ranks, each of which then has pages enough."""
    has_ranks = (within is None or within.spread) and max(admitted_values(RANKS, within, "ranks")) > 1
    if not has_ranks or len(case.prompt) > FAR_ON_RANKS:
        return False
    try:
        _spread(case, max(RANKS))
    except Malformed:
        return False
    return True


def _spread(case: Case, ranks: int) -> Case:
    """`case` with its requests spread over ranks, whose pools have as many pages as their requests need."""
    return replace(case, ranks=ranks, spread=True, layout=replace(case.layout, pages=()))


def can_play_sessions(within: Abilities | None) -> bool:
    """Whether the engine plays sessions of at least two requests."""
    return within is None or (within.sessions and within.most_requests != 1)


def longest_far_prompt(most: int, within: Abilities | None) -> int:
    """The longest of the long prompts for an engine, at most `most`; 0 if it takes no long prompt or no such model."""
    if within is None:
        return most
    room = min(most, within.longest - SPARE) if within.longest else most
    return room if room > MARKS[0] + 2 and far_architectures(within) else 0


def temperatures(within: Abilities | None) -> tuple[float, ...]:
    """The temperatures above 0 of TEMPERATURES that the engine takes, or else its own highest one."""
    highest = float("inf") if within is None else within.max_temperature
    return tuple(temperature for temperature in TEMPERATURES if temperature <= highest) or (
        (highest,) if highest else ()
    )


def chains_only(within: Abilities | None) -> bool:
    """Whether every acceptance rule of the engine verifies chains alone."""
    return within is not None and bool(within.rules) and all(RULES[name].chains_only for name in within.rules)


@st.composite
def far_cases(
    draw: st.DrawFn,
    dtypes: tuple[str, ...] = ("float32", "float64"),
    processors: tuple[str, ...] = (),
    layout: str | None = None,
    most: int = MARKS[-1],
    within: Abilities | None = None,
    swarm: Swarm = ALL_ON,
) -> Case:
    """Cases with a prompt of about 128 to `most` tokens; two in three have mates with related prompts.

    Of the `swarm`, its features and the traits that such a target can have count, and no sizes. In a layout of rings,
    which prefill in blocks of a tree's size, prompts have about 128 tokens.
    """
    company = can_play_sessions(within) and draw(st.integers(0, 2)) > 0
    most = min(most, MARKS[0]) if layout is not None and KINDS[layout].ring else most
    case = draw(
        single_cases(
            dtypes, processors, layout, company=company, far=most, within=within, swarm=replace(swarm, sizes=())
        )
    )
    return draw(with_mates(case, layout, within)) if company else case


@st.composite
def session_cases(
    draw: st.DrawFn,
    dtypes: tuple[str, ...] = ("float32", "float64"),
    processors: tuple[str, ...] = (),
    layout: str | None = None,
    within: Abilities | None = None,
    swarm: Swarm = ALL_ON,
) -> Case:
    """Cases with a session."""
    case = draw(single_cases(dtypes, processors, layout, company=True, within=within, swarm=swarm))
    return draw(with_mates(case, layout, within, swarm))


@st.composite
def with_mates(
    draw: st.DrawFn,
    case: Case,
    layout: str | None = None,
    within: Abilities | None = None,
    swarm: Swarm = ALL_ON,
) -> Case:
    """`case` with mates; some of them have the draft of another case that is drawn on the same model."""
    assert isinstance(case.model, Seeded)
    stranger = draw(single_cases((case.dtype,), (), layout, case.model, True, within=within, swarm=swarm))
    if within is not None and within.continuous:
        return draw(with_continuous_session(case, stranger, within))
    case_with_mates = draw(with_session(case, stranger, layout, within, swarm))
    return draw(with_tiers(case_with_mates, within))


def takes_quantised_target(case: Case, within: Abilities | None) -> bool:
    """Whether the engine computes with quantised weights, and the target may have them."""
    mates = case.session.mates if case.session is not None else ()
    adapted = case.model.adapter is not None or any(mate.adapter is not None for mate in mates)
    admits = not adapted and case.ranks == 1 and len(case.prompt) <= LONGEST
    return admits and (within is None or within.quantised)


@st.composite
def with_quantised_target(draw: st.DrawFn, case: Case, swarm: Swarm = ALL_ON) -> Case:
    """`case`, or in one of QUANTISED_INTERVAL the same case on a target whose projections are of few bits."""
    assert isinstance(case.model, Seeded)
    interval = swarm.interval(QUANTISED_TARGETS, QUANTISED_INTERVAL)
    if draw(st.integers(0, interval - 1)) < interval - 1:
        return case
    return replace(case, model=replace(case.model, quantised=draw(st.sampled_from(tuple(QUANTISED)))))


@st.composite
def with_left_padding(draw: st.DrawFn, case: Case, within: Abilities | None, swarm: Swarm = ALL_ON) -> Case:
    """`case`, or in one of several the same case padded on the left; long prompts and sharded targets are not."""
    if "left_pad" in ignored_settings(within) or case.ranks > 1 or len(case.prompt) > LONGEST:
        return case
    interval = swarm.interval("left_pad", PADDED if case.session is None else PADDED_TOGETHER)
    if draw(st.integers(0, interval - 1)) < interval - 1:
        return case
    return replace(case, layout=replace(case.layout, left_pad=draw(st.sampled_from(FRONTS))))


def takes_scores(case: Case, within: Abilities | None) -> bool:
    """Whether the engine tells the log-probabilities of the prompt of `case`; long prompts go without."""
    admits = case.ranks == 1 and len(case.prompt) <= LONGEST
    return admits and (within is None or within.prompt_logprobs)


def score_interval(case: Case) -> int:
    """Of so many cases like this, a single case asks."""
    return SCORED_TOGETHER if case.session is not None and case.layout.traits.keeps_prefixes else SCORE_INTERVAL


@st.composite
def with_scores(draw: st.DrawFn, case: Case) -> Case:
    """`case` with the log-probabilities of its prompt asked for, or those of prompts of its session."""
    if case.session is None:
        return replace(case, sampling=replace(case.sampling, prompt_logprobs=True))
    scores_own_prompt = draw(st.sampled_from((True, True, False)))
    mates = tuple(
        replace(mate, sampling=replace(mate.sampling, prompt_logprobs=True))
        if draw(st.booleans()) or not scores_own_prompt
        else mate
        for mate in case.session.mates
    )
    sampling = replace(case.sampling, prompt_logprobs=scores_own_prompt)
    return replace(case, sampling=sampling, session=replace(case.session, mates=mates))
