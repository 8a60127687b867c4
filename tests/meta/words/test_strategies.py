"""What may be drawn is drawn: every kind of case that the work asks for, and failures shrink to something small."""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from random import Random

import pytest
from hypothesis import HealthCheck, find, settings

from specverify.campaign.case_stream import Stream
from specverify.plan import DEFAULT_DTYPES
from specverify.properties.invariants import ALL
from specverify.properties.strategies import cases, sessions
from specverify.properties.strategies.conditions import FAR
from specverify.properties.strategies.models import GALLERY, SEEDS
from specverify.properties.strategies.sessions import actions
from specverify.properties.strategies.settings import explore
from specverify.properties.verdict.invariant import taking_turns
from specverify.properties.verdict.subject import Pace
from specverify.reference.architecture import ROPE_KINDS, Architecture, Seeded
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel, Scripted
from specverify.reference.draft.block import Block
from specverify.reference.draft.eagle1 import Eagle1
from specverify.reference.draft.layer_head import ALIGNMENTS, FIRST_TOKENS, LayerHead
from specverify.reference.draft.mtp import Mtp
from specverify.reference.family import FAMILIES
from specverify.reference.kv_rounding import LARGEST
from specverify.reference.layout import COMMITS, KV_SCALES, PAGE_STATES, KvLayout
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.oracle.stopping import finish_reason
from specverify.reference.sampling import Stops
from specverify.reference.session import Action, Session
from specverify.reference.trace import Trace
from specverify.reference.tree import Shape, Tree
from tests.models import LARGE_LLAMA

MOST = 2000
"""Cases that may be drawn until each kind was met once; a kind that none of them is an example of is absent.

The rarest kinds are one case in 400. Seed 2 meets all kinds within 718 cases, others within 1,900.
"""

_ORACLE = Oracle(keep=2048)


def trees(case: Case) -> tuple[Tree, ...]:
    """The trees that the case proposes before it ends."""
    return tuple(step.drafted.tree for step in _ORACLE(case).steps if step.drafted)


def shape_kinds(tree: Shape) -> Iterator[str]:
    nodes = len(tree)
    below = [len(children) for children in tree.children]
    spine = max(range(nodes), key=lambda node: tree.depth[node])
    if nodes == 1:
        yield "one node"
    if nodes > 48:
        yield "more than 48 nodes"
    if nodes > 2 and tree.height == nodes - 1:
        yield "chain"
    if nodes > 3 and tree.height == 1:
        yield "star"
    if nodes > 5 and max(below) == 2 and all(below[node] == 0 or node in tree.path(spine) for node in range(nodes)):
        yield "comb"
    inner = [count for count in below if count]
    if tree.height > 1 and min(inner[:-1], default=0) > 1 and len(set(inner[:-1])) == 1 and max(inner) == inner[0]:
        yield "full"
    if any(up > node for node, up in enumerate(tree.parent)):
        yield "a parent after its child"
    if tree.height > 8:
        yield "deeper than 8"


def kinds(case: Case) -> Iterator[str]:
    """The kinds of case that a case is an example of."""
    trace, arch = _ORACLE(case), _architecture(case)
    top, last = case.model.vocab_size - 1, len(case.prompt)
    if arch in GALLERY:
        yield f"architecture {GALLERY.index(arch)}"
    if isinstance(case.model, Seeded):
        yield f"seed {case.model.seed}"
    yield f"draft {type(case.draft).__name__}"
    yield f"family {arch.family}"
    yield f"{arch.heads // arch.kv_heads} query heads for a KV head"
    yield f"rope {arch.rope.kind}"
    yield f"commit {case.layout.commit}"
    yield f"dtype {case.dtype}"
    yield "odd vocabulary" if case.model.vocab_size % 2 else "even vocabulary"
    yield "tied" if arch.tied else "untied"
    yield f"{arch.layers} layers"
    for window in set(arch.windows) - {0}:
        yield "a window"
        for off in (-1, 0, 1):
            if last == window + off:
                yield f"prompt {off:+d} of a window"
        if last > window + 1:
            yield "prompt past a window"
        if last - window in (-1, 0, 1, 2) and window in WINDOWS:
            yield f"prompt around a window of {window}"
        if last > window + 2 and window in WINDOWS:
            yield f"prompt past a window of {window}"
    if len(set(arch.windows)) > 1:
        yield "layers of different windows"
    for tree in trees(case):
        yield from shape_kinds(tree)
        yield from (size for size, (least, most) in SIZES.items() if least <= len(tree) <= most)
        if tree.has_twins:
            yield "twins"
        if 0 in tree.token[1:]:
            yield "token 0 in a tree"
        if top in tree.token[1:]:
            yield "token V-1 in a tree"
    if 0 in case.prompt:
        yield "token 0 in a prompt"
    if top in case.prompt:
        yield "token V-1 in a prompt"
    if last == 1:
        yield "prompt of one token"
    if last > 200:
        yield "prompt past 200"
    for power in POWERS:
        if abs(last - power) <= (1 if power < 64 else 2):
            yield f"prompt around {power}"
    yield from walk_kinds(trace)
    yield from stop_kinds(case)
    yield from layout_kinds(case)
    yield from (condition.name for condition in FAR if condition.name in FAR_KINDS and condition.is_met(case))
    every = [case.model.adapter, *(mate.adapter for mate in (case.session.mates if case.session else ()))]
    if any(every):
        yield "an adapter" if len(set(every)) == 1 else "adapters of several requests"
        if case.layout.traits.keeps_prefixes:
            yield "adapters beside kept prefixes"
    requests = [case.alone(number) for number in range(1 + len(case.session.mates if case.session else ()))]
    for request in (request for request in requests if request.model.images):
        if any(image.seed for image in request.model.images):
            yield "an image with embeddings of its own"
        if request.draft.sees_images:
            yield "a head sees images" if request.draft.reads else "a draft model sees images"
    if case.layout.left_pad:
        yield "left padding" if case.session is None else "left padding of a session"
    if case.layout.mixed_prefill:
        yield "prompts filled beside trees"
    if case.layout.draft_page_size:
        yield "pages of drafts of their own" if case.session is None else "pages of drafts of their own in a session"
    if case.layout.state_slots:
        yield "slots of states" if case.session is None else "slots of states of a session"
    if case.layout.kv_dtype:
        yield f"columns in {case.layout.kv_dtype}, scales by {case.layout.kv_scales}"
    settings = [case.sampling, *(mate.sampling for mate in (case.session.mates if case.session else ()))]
    if any(setting.prompt_logprobs for setting in settings):
        yield "a scored prompt"
        if case.layout.traits.keeps_prefixes:
            yield "a scored prompt beside kept prefixes"
    yield from serving_kinds(case)
    if case.draft.expansion is not None:
        yield "a dynamic tree" if case.draft.expansion.rerank else "a greedy top-k tree"
        if not case.sampling.greedy:
            yield "a dynamic tree of a request that samples"
        if len({tree.parent for tree in trees(case)}) > 1:
            yield "a dynamic tree that changes its shape"
    if isinstance(case.draft, Eagle1):
        shapes = {"layers": case.draft.layers > 1, "iRoPE": case.draft.unrotated, "experts": case.draft.experts}
        yield from (f"a head with {name}" for name, is_present in shapes.items() if is_present)
    if isinstance(case.draft, Mtp) and case.draft.layer is None:
        yield "MTP modules with the target's layers"
    if isinstance(case.draft, Block):
        switches = {
            "with windows": case.draft.windows, "with a Markov head": case.draft.markov_rank,
            "scored from the root's slot": case.draft.from_anchor,
        }  # fmt: skip
        yield from (f"a block {words}" for words, is_present in switches.items() if is_present)
        if case.draft.causal == "all":
            yield "a causal block"
    if isinstance(case.draft, LayerHead):
        yield f"first token {case.draft.first_token}"
        yield f"alignment {case.draft.alignment}"
        if case.layout.traits.keeps_prefixes:
            yield f"states of pages {case.layout.page_states}"
    if case.draft.dispatch is not None:
        yield "a table of trees by batch size"
        if len({tree.parent for tree in trees(case)}) > 1:
            yield "a table that gives two trees"
    if isinstance(case.draft, LanguageModel):
        yield "reduced vocabulary" if case.draft.vocabulary else "whole vocabulary"
        if isinstance(case.draft.model, Seeded) and case.draft.model.quantised:
            yield f"weights in {case.draft.model.quantised}"
        yield "the target drafts for itself" if case.draft.model == case.model else "a stranger drafts"
        if case.draft.expansion is None and sum(map(bool, case.draft.shapes[0].children)) > 2:
            yield "a static tree with inner nodes"


def serving_kinds(case: Case) -> Iterator[str]:
    """Where several requests or ranks meet a model, a grammar or a layout that few cases have."""
    mates = case.session.mates if case.session is not None else ()
    settings = [case.sampling, *(mate.sampling for mate in mates)]
    moved = (
        [action.requests[0] for action in case.session.actions if action.kind == "hand-over"] if case.session else []
    )
    if any(settings[number].grammar is not None for number in moved):
        yield "a hand-over of a grammar"
    if moved and case.layout.traits.ring and any(_architecture(case).windows):
        yield "a hand-over of layers with windows"
    if case.ranks > 1 and not case.spread and _architecture(case).output_bias:
        yield "ranks of which one adds a bias"
    if case.draft_ranks:
        yield "a draft shared out among ranks" if case.drafting_ranks > 1 else "a draft on rank 0 alone"
    if case.layout.second_tier and any(_alike_behind_others(case, mate.prompt) for mate in mates):
        yield "a second tier with pages alike behind others"
    if case.session is not None and case.layout.traits.pages:
        yield from shared_page_kinds(case, case.session)


def shared_page_kinds(case: Case, session: Session) -> Iterator[str]:
    """Where a request shares or takes over pages of another one with the same draft."""
    size = case.layout.page_size
    forked = [action.requests for action in session.actions if action.kind == "fork"]
    if (0, 1) in forked and case.draft.model is not None and session.mates[0].draft == case.draft:
        yield "a fork of a draft model's pages"
    if not case.layout.traits.keeps_prefixes or not session.mates:
        return
    prompt = session.mates[0].prompt
    if len(prompt) > size and any(prompt == case.prompt[start:] for start in range(size, len(case.prompt), size)):
        yield "a page met again in another place"
    if _architecture(case).recurrent and len(prompt) > len(case.prompt) and prompt[: len(case.prompt)] == case.prompt:
        yield "a next turn of a hybrid"
    if case.draft.reads is not None and len(prompt) > size and prompt[:size] == case.prompt[:size]:
        yield "a known page of a head"


def _alike_behind_others(case: Case, prompt: tuple[int, ...]) -> bool:
    """Whether `prompt` and that of `case` have the same tokens in a page, and others in an earlier one."""
    size = case.layout.page_size
    return any(
        case.prompt[start : start + size] == prompt[start : start + size] and case.prompt[:start] != prompt[:start]
        for start in range(size, min(len(prompt), len(case.prompt)) - size + 1, size)
    )


def walk_kinds(trace: Trace) -> Iterator[str]:
    yield f"finish {trace.finish}"
    if len(trace.steps) > 1:
        yield "several steps"
    if len(trace.steps) > 4:
        yield "more than four steps"
    for number, step in enumerate(trace.steps):
        assert step.drafted is not None
        assert step.accepted is not None
        assert step.emitted is not None
        tree, path, emitted = step.drafted.tree, step.accepted.path, step.emitted
        if len(tree) > 1:
            yield f"accepts {len(path) - 1}" if len(path) < 6 else "accepts more than 4"
            if path[-1] in tree.leaves and len(path) - 1 == tree.height:
                yield "accepts all"
            if number:
                yield "a tree in a later step"
                if len(path) > 1:
                    yield "accepts in a later step"
        if path != tuple(range(len(path))):
            yield "accepted path is no prefix of the row order"
        if any(len({tree.token[child] for child in tree.children[node]}) < len(tree.children[node]) for node in path):
            yield "twins under an accepted node"
        if any(tree.token[node] == 0 for node in path[1:]):
            yield "accepts token 0"
        if emitted.finish and len(emitted.tokens) < len(path):
            yield f"{emitted.finish} inside an accepted block"
        if tree.children[path[-1]]:
            yield "rejects a child of the last accepted node"


def layout_kinds(case: Case) -> Iterator[str]:
    largest = max(map(len, trees(case)))
    if case.layout.padded_nodes:
        yield "padding" if case.layout.padded_nodes > largest else "padding to no more than the tree"
    chunk = case.layout.prefill_chunk
    if chunk and len(case.prefix) > chunk:
        yield "prefill in several chunks"
        if len(case.prefix) % chunk:
            yield "a last chunk that is not full"
        if chunk == 1:
            yield "prefill token by token"


def _architecture(case: Case) -> Architecture:
    assert isinstance(case.model, Seeded)
    return case.model.architecture


POWERS = tuple(2**power for power in range(9))

SIZES = {
    **{f"{size} nodes": (size, size) for size in range(2, 11)},
    **{f"{least} to {least + 3} nodes": (least, least + 3) for least in range(11, 31, 4)},
    "31 to 48 nodes": (31, 48),
}
"""The least and the most nodes of a tree."""

WINDOWS = sorted({window for arch in GALLERY for window in arch.windows} - {0})
"""Those of ordinary prompts; models for long prompts have wider ones."""

FAR_KINDS = (
    *("prefix of 512 columns", "two lanes split"),
    *("fork across draft models", "prefix hit across draft models"),
)
"""Conditions of FAR that no case met before prompts ended beyond 300 tokens, and mates drafted with another model."""

STOPS = ("eos", "stop token", "string", "max_new_tokens", "max_length", "min_tokens")
PLACES = (*(f"at {place}" for place in range(4)), "on the bonus")

JOINED = (("eos", "at 3"), ("stop token", "at 3"))
"""Few blocks are so long, and of those few tokens are met there for the first time: both are `an end token at 3`."""

KINDS = (
    *("one node", "more than 48 nodes", "chain", "star", "comb", "full", "deeper than 8", "a parent after its child"),
    *("twins", "twins under an accepted node", "accepted path is no prefix of the row order", "accepts token 0"),
    *(f"token {token} in a {place}" for token in ("0", "V-1") for place in ("tree", "prompt")),
    *("prompt of one token", "prompt past 200", "prompt past a window"),
    *(f"architecture {number}" for number in range(len(GALLERY))),
    *(f"seed {seed}" for seed in range(SEEDS)),
    *SIZES,
    *(f"prompt {place} a window of {window}" for place in ("around", "past") for window in WINDOWS),
    *(f"prompt {off:+d} of a window" for off in (-1, 0, 1)),
    *(f"prompt around {power}" for power in POWERS),
    *(f"accepts {depth}" for depth in range(5)),
    *("accepts more than 4", "accepts all", "rejects a child of the last accepted node"),
    *(f"family {family}" for family in FAMILIES),
    *(f"{ratio} query heads for a KV head" for ratio in (1, 2, 3, 4)),
    *("odd vocabulary", "even vocabulary", "tied", "untied", "1 layers", "2 layers", "3 layers"),
    *(f"rope {kind}" for kind in ROPE_KINDS if kind != "longrope"),
    *("draft Scripted", "draft Ngram", "draft LanguageModel"),
    *("draft Eagle1", "draft Eagle3", "draft Medusa", "draft Mtp", "draft Block", "draft PEagle"),
    *("a block with windows", "a block with a Markov head", "a block scored from the root's slot", "a causal block"),
    "MTP modules with the target's layers",
    *("draft Trie", "draft Automaton", "draft Merged"),
    *("a head with layers", "a head with iRoPE", "a head with experts"),
    *(f"first token {word}" for word in FIRST_TOKENS),
    *(f"alignment {word}" for word in ALIGNMENTS),
    *(f"states of pages {word}" for word in PAGE_STATES),
    "a known page of a head",
    *("weights in int4", "weights in int4-groups", "weights in int4-zero-points", "weights in int8", "weights in fp8"),
    *("reduced vocabulary", "whole vocabulary", "a dynamic tree", "a greedy top-k tree"),
    *("a dynamic tree of a request that samples", "a dynamic tree that changes its shape"),
    *("a table of trees by batch size", "a table that gives two trees"),
    *("the target drafts for itself", "a stranger drafts", "a static tree with inner nodes"),
    *(f"commit {commit}" for commit in COMMITS),
    *("padding", "padding to no more than the tree", "dtype float32", "dtype float64"),
    *("prefill in several chunks", "prefill token by token", "a last chunk that is not full"),
    *(f"{why} inside an accepted block" for why in ("eos", "stop", "length", "grammar")),
    *("an adapter", "adapters of several requests", "adapters beside kept prefixes"),
    *("left padding", "left padding of a session", "prompts filled beside trees"),
    *("slots of states", "slots of states of a session"),
    *(f"columns in {dtype}, scales by {scales}" for dtype in LARGEST for scales in KV_SCALES),
    *("an image with embeddings of its own", "a head sees images", "a draft model sees images"),
    *("pages of drafts of their own", "pages of drafts of their own in a session"),
    *("a scored prompt", "a scored prompt beside kept prefixes"),
    *("a hand-over of a grammar", "a hand-over of layers with windows"),
    *("a draft shared out among ranks", "a draft on rank 0 alone"),
    *("ranks of which one adds a bias", "a second tier with pages alike behind others"),
    *("a fork of a draft model's pages", "a page met again in another place", "a next turn of a hybrid"),
    *("finish eos", "finish stop", "finish length", "finish grammar", "several steps", "more than four steps"),
    *(f"{stop} {place}" for stop in STOPS for place in PLACES if (stop, place) not in JOINED),
    *("an end token at 3", "string over two blocks", *FAR_KINDS),
    *("a tree in a later step", "accepts in a later step", "a window", "layers of different windows"),
)
"""What some drawn case must be an example of; `python -m tests.measure search` says how large the shares are."""


def test_few_kinds_of_case_are_absent_from_the_first_cases() -> None:
    drawn_kinds = {kind for case in islice(Stream(2, DEFAULT_DTYPES), 50) for kind in kinds(case)}
    assert drawn_kinds <= set(KINDS)
    assert len(drawn_kinds) > 0.5 * len(KINDS)


@pytest.mark.slow
def test_no_kind_of_case_is_absent() -> None:
    absent, known_kinds = set(KINDS), set(KINDS)
    cases_drawn: set[Case] = set()
    for number, case in enumerate(islice(Stream(2, DEFAULT_DTYPES), MOST), 1):
        examples = set(kinds(case))
        assert examples <= known_kinds
        absent -= examples
        cases_drawn.add(case)
        if not absent:
            assert len(cases_drawn) > number / 2
            return
    assert not absent


def stop_kinds(case: Case) -> Iterator[str]:
    """Where in its accepted block the output ends, by what ended it, and where min_tokens kept it alive."""
    trace, stops, least = _ORACLE(case), case.stops, case.sampling.min_tokens
    ended = {*stops.eos, *stops.stop_tokens}
    before: tuple[int, ...] = ()
    for step in trace.steps:
        assert step.drafted is not None
        assert step.accepted is not None
        assert step.emitted is not None
        assert step.scored is not None
        path, block = step.accepted.path, step.emitted.tokens
        for position in range(len(block)):
            written = (*before, *block[: position + 1])
            passed = finish_reason(written, stops, len(case.prompt)) in ("eos", "stop")
            banned = int(step.scored.logits[path[position]].argmax()) in ended
            if len(path) > 1 and len(written) <= least and (passed or banned):
                yield from place_kinds("min_tokens", position, len(path))
        if step.emitted.finish is not None and len(path) > 1:
            stop = stop_name(step.emitted.finish, block[-1], stops)
            yield from place_kinds(stop, len(block) - 1, len(path))
        if step.emitted.finish == "stop" and block[-1] not in stops.stop_tokens and before:
            start = "".join(stops.pieces[token] for token in before)
            text = start + "".join(stops.pieces[token] for token in block)
            piece = len(stops.pieces[block[-1]])
            offsets = [text.find(stop, len(text) - piece - len(stop) + 1) for stop in stops.stop_strings]
            if any(0 <= offset < len(start) for offset in offsets):
                yield "string over two blocks"
        before += block


def stop_name(finish: str, last: int, stops: Stops) -> str:
    if finish == "stop":
        return "stop token" if last in stops.stop_tokens else "string"
    return finish if finish == "eos" else "max_length" if stops.max_length else "max_new_tokens"


def place_kinds(stop: str, row: int, rows: int) -> Iterator[str]:
    """That `stop` falls on a row of a block of `rows` rows, whose last is the bonus; beyond PLACES nothing is said."""
    place = "on the bonus" if row == rows - 1 else f"at {row}"
    if (stop, place) in JOINED:
        yield f"an end token {place}"
    elif place in PLACES:
        yield f"{stop} {place}"


def branches(case: Case) -> bool:
    return isinstance(case.draft, Scripted) and any(len(tree.leaves) > 1 for tree in case.draft.trees)


def out_of_order(case: Case) -> bool:
    return "accepted path is no prefix of the row order" in walk_kinds(_ORACLE(case))


SLOW = pytest.mark.slow


def window_shorter_than_prompt(case: Case) -> bool:
    return any(0 < window < len(case.prompt) for window in _architecture(case).windows)


@pytest.mark.parametrize(
    ("predicate", "nodes", "prompt"),
    [
        pytest.param(branches, 5, 1, marks=SLOW),
        pytest.param(out_of_order, 5, 2, marks=SLOW),
        pytest.param(window_shorter_than_prompt, 1, 8, marks=SLOW),
    ],
)
def test_shrinks_to_something_small(predicate: Callable[[Case], bool], nodes: int, prompt: int) -> None:
    quiet = settings(max_examples=1000, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    least = find(cases(), predicate, settings=quiet, random=Random(1))
    assert max(map(len, trees(least))) <= nodes
    assert len(least.prompt) <= prompt
    assert least.layout == KvLayout()
    assert least.stops == Stops(1)


def test_a_slow_backend_is_asked_for_variants_more_rarely_and_for_the_rest_always() -> None:
    some = tuple(Case(LARGE_LLAMA, (token, second_token)) for token in range(20) for second_token in range(10))
    often, seldom = ([taking_turns(case, ALL, Pace(variant_interval)) for case in some] for variant_interval in (1, 4))
    always = {invariant.name for invariant in ALL if invariant.every == 1}
    for often_turn, seldom_turn in zip(often, seldom, strict=True):
        assert always <= {invariant.name for invariant in seldom_turn} <= {invariant.name for invariant in often_turn}
    turns = [sum(invariant.every > 1 for turn in run_turns for invariant in turn) for run_turns in (often, seldom)]
    assert 0 < 3 * turns[1] < turns[0] < 6 * turns[1]


def test_a_request_in_focus_is_interrupted_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leftover of an interruption shows at the next interruption of the same request."""

    def interruptions() -> float:
        """The interruptions of the request that has most of them, on average."""
        drawn: list[tuple[Action, ...]] = []
        explore(7, 150, actions(4), lambda session_actions: drawn.append(session_actions))
        interrupted = [
            Counter(action.requests[0] for action in session_actions if action.kind not in ("add", "step"))
            for session_actions in drawn
        ]
        most = [max(counts.values(), default=0) for counts in interrupted]
        return sum(most) / len(most)

    focused = interruptions()
    monkeypatch.setattr(sessions, "IN_FOCUS", 1)
    assert focused > 1.1 * interruptions()


def test_whoever_finds_a_full_pool_tries_again_behind_an_action_that_makes_room() -> None:
    drawn: list[tuple[Action, ...]] = []
    explore(5, 100, actions(4), lambda session_actions: drawn.append(session_actions))
    assert sum(any(tries_again(session_actions)) for session_actions in drawn) >= 25


def tries_again(session_actions: tuple[Action, ...]) -> Iterator[bool]:
    """For each request whether it tries to enter, another leaves, and it tries once more."""
    for request in range(4):
        tries = [index for index, action in enumerate(session_actions) if action == Action("add", (request,))]
        leaves = [index for index, action in enumerate(session_actions) if action.kind in ("cancel", "evict")]
        yield bool(tries) and any(
            tries[0] < index < tries[-1] and request not in session_actions[index].requests for index in leaves
        )
