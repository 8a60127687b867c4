"""Axes: what a case may have, as a table of axes with their values.

A request has any number of values of an axis: a model with a window and experts has two of `target`. A new kind of
draft, layout or rule brings its value by itself; a new field of a case needs a row here (see CONTRIBUTING).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from specverify.properties.target_traits import TRAITS, has_recurrent_state
from specverify.properties.verdict.coverage.request import JudgedRequest
from specverify.reference.draft import KINDS as DRAFTS
from specverify.reference.draft import largest_tree_size
from specverify.reference.draft_trees import TREE_KINDS
from specverify.reference.grammar import KINDS as GRAMMARS
from specverify.reference.kv_rounding import DYNAMIC
from specverify.reference.layout import KINDS as LAYOUTS
from specverify.reference.layout import PAGE_STATES, POISONS, SYNCS
from specverify.reference.rules import DRAWS, RULES


@dataclass(frozen=True)
class Axis:
    """An axis of coverage.

    Attributes:
        name: The axis.
        values: Its values, in order.
        of: The values that a request has.
        several: Whether a request may have two of its values, which are then a pair as well.
    """

    name: str
    values: tuple[str, ...]
    of: Callable[[JudgedRequest], Iterator[str]]
    several: bool = False


def _classes(ends: tuple[int, ...], unit: str) -> tuple[str, ...]:
    """The names of classes of a size: up to each of `ends`, and above the last."""
    return (*(f"up to {end:,} {unit}" for end in ends), f"over {ends[-1]:,} {unit}")


def _class_of(size: int, ends: tuple[int, ...], unit: str) -> str:
    return next((name for name, end in zip(_classes(ends, unit), ends, strict=False) if size <= end), _over(ends, unit))


def _over(ends: tuple[int, ...], unit: str) -> str:
    return _classes(ends, unit)[-1]


def _target(request: JudgedRequest) -> Iterator[str]:
    arch = request.architecture
    if arch is None:
        return
    yield from (name for name, has_trait in TRAITS.items() if has_trait(arch))
    model = request.alone.model
    of_request = {
        "images": bool(model.images),
        "adapter": model.adapter is not None,
        "quantised": bool(request.case.model.quantised),
    }
    yield from (name for name, is_present in of_request.items() if is_present)


TARGETS = (*TRAITS, "images", "adapter", "quantised")


def _draft(request: JudgedRequest) -> Iterator[str]:
    yield request.alone.draft.TAG


SEES = "sees the images"
"""The trait of drafts that read the images of their request."""

RECURRENT = "draft with a recurrent state"
"""The trait of draft models that keep more than columns, which every rejection, fork and hand-over must carry along."""


def _draft_traits(request: JudgedRequest) -> Iterator[str]:
    draft = request.alone.draft
    parts = {
        "reads hidden states": draft.reads is not None,
        "vocabulary of its own": bool(draft.vocabulary),
        "quantised draft": bool(draft.in_bits),
        "learns from other requests": draft.shared,
        "draft of several layers": (draft.kv_sizes or (0, 0, 0))[0] > 1,
        "draft of another family": _is_of_another_family(request),
        RECURRENT: has_recurrent_state(draft.model),
        SEES: draft.sees_images and bool(request.alone.model.images),
    }
    yield from (name for name, is_present in parts.items() if is_present)


def _is_of_another_family(request: JudgedRequest) -> bool:
    model, arch = request.alone.draft.model, request.architecture
    drafting = getattr(model, "architecture", None)
    return drafting is not None and arch is not None and drafting.family != arch.family


NODES = (4, 16, 64)


def _tree(request: JudgedRequest) -> Iterator[str]:
    draft = request.alone.draft
    size = largest_tree_size(draft)
    if size > 1:
        yield _class_of(size, NODES, "nodes")
        yield "branches" if draft.branches else "chain"
    if draft.tree_kind != "static":
        yield f"{draft.tree_kind} tree"
    if draft.height >= 4:
        yield "four levels"


def _sampling(request: JudgedRequest) -> Iterator[str]:
    sampling = request.alone.sampling
    yield "greedy" if sampling.greedy else "sampled"
    parts = {
        "temperature below 0.5": 0 < sampling.temperature < 0.5,
        "temperature above 1.5": sampling.temperature > 1.5,
        "top-k": sampling.top_k > 0,
        "top-p": sampling.top_p < 1,
        "min-p": sampling.min_p > 0,
        "repetition penalty": sampling.repetition_penalty != 1,
        "presence or frequency penalty": bool(sampling.presence_penalty or sampling.frequency_penalty),
        "bad words": bool(sampling.bad_words),
        "min_tokens": sampling.min_tokens > 0,
        "log-probabilities of the prompt": sampling.prompt_logprobs,
    }
    yield from (name for name, is_present in parts.items() if is_present)


SAMPLINGS = (
    "greedy", "sampled", "temperature below 0.5", "temperature above 1.5", "top-k", "top-p", "min-p",
    "repetition penalty", "presence or frequency penalty", "bad words", "min_tokens", "log-probabilities of the prompt",
)  # fmt: skip


BEHIND_MARKER, WITH_BUDGET = "behind a marker", "behind a marker that a budget forces"
"""The traits of grammars that do not hold from the first output token on."""


def _rule(request: JudgedRequest) -> Iterator[str]:
    sampling = request.alone.sampling
    if not sampling.greedy and largest_tree_size(request.alone.draft) > 1:
        yield sampling.rule.name


def _draws(request: JudgedRequest) -> Iterator[str]:
    draft, sampling = request.alone.draft, request.alone.sampling
    if not sampling.greedy and draft.has_law:
        yield sampling.draws


def _grammar(request: JudgedRequest) -> Iterator[str]:
    grammar = request.alone.sampling.grammar
    if grammar is not None:
        yield grammar.kind


def _grammar_beginning(request: JudgedRequest) -> Iterator[str]:
    grammar = request.alone.sampling.grammar
    if grammar is not None and grammar.markers:
        yield WITH_BUDGET if grammar.budget else BEHIND_MARKER


def _stops(request: JudgedRequest) -> Iterator[str]:
    stops = request.alone.stops
    parts = {
        "eos": bool(stops.eos),
        "stop token": bool(stops.stop_tokens),
        "stop string": bool(stops.stop_strings),
        "longest length": bool(stops.max_length),
    }
    yield from (name for name, is_present in parts.items() if is_present)


def _layout(request: JudgedRequest) -> Iterator[str]:
    yield request.case.layout.kind


def _is_recurrent(request: JudgedRequest) -> bool:
    """Whether the target or the draft model of the request has a recurrent state."""
    return any(map(has_recurrent_state, (request.case.model, request.alone.draft.model)))


def _layout_traits(request: JudgedRequest) -> Iterator[str]:
    layout = request.case.layout
    arch = request.architecture
    parts = {
        "fast commit": layout.commit == "fast",
        "commit by length": layout.commit == "length",
        "padded rows": layout.padded_nodes > 0,
        "prefill in chunks": layout.prefill_chunk > 0,
        "over-allocated": layout.overhang > 0,
        SYNC: layout.draft_sync == SYNCS[1],
        "tree cut at a chunk": layout.stay_in_chunk,
        "latent cache": layout.latent and arch is not None and arch.words.projections is not None,
        "first tier": layout.first_tier > 0,
        "second tier": layout.second_tier > 0,
        "several branches": layout.branches > 0,
        "padded on the left": layout.left_pad > 0,
        MIXED: layout.mixed_prefill,
        SLOTS: layout.state_slots > 0 and _is_recurrent(request),
        STATES: layout.page_states == PAGE_STATES[1] and request.alone.draft.reads is not None,
        STORED_BY_ROW: bool(layout.kv_dtype) and layout.kv_scales in DYNAMIC,
        **{name: layout.kv_dtype == dtype for dtype, name in STORED_DTYPES.items()},
        APART: layout.draft_page_size > 0 and request.alone.draft.has_columns,
        "free pages in another order": bool(layout.pages),
        **{f"cells of {value}": layout.poison == value for value in POISONS if value},
    }
    yield from (name for name, is_present in parts.items() if is_present)


SYNC, STATES, SLOTS = "draft fed anew", "states of pages recomputed", "recurrent states in slots"
APART, MIXED = "draft's pages of another size", "prompts filled beside trees"
STORED_DTYPES = {"fp8_e4m3": "columns in fp8", "int8": "columns in int8"}
STORED_BY_ROW = "scales by row"
LAYOUT_TRAITS = (
    "fast commit", "commit by length", "padded rows", "prefill in chunks", "over-allocated", SYNC,
    "tree cut at a chunk", "latent cache", "first tier", "second tier", "several branches", "padded on the left",
    MIXED, STATES, SLOTS, APART, *STORED_DTYPES.values(), STORED_BY_ROW,
    "free pages in another order", *(f"cells of {value}" for value in POISONS if value),
)  # fmt: skip


def _dtype(request: JudgedRequest) -> Iterator[str]:
    yield request.case.dtype


def _ranks(request: JudgedRequest) -> Iterator[str]:
    if request.case.spread:
        yield "requests shared out among ranks"
    elif request.case.ranks > 1:
        yield f"{request.case.ranks} ranks"


ON_ONE, ON_SEVERAL = "draft on rank 0 alone", "draft shared out among ranks"


def _draft_ranks(request: JudgedRequest) -> Iterator[str]:
    if request.case.draft_ranks:
        yield ON_ONE if request.alone.drafting_ranks == 1 else ON_SEVERAL


HEAD_DIMS, VOCABULARIES, PROMPTS, REQUESTS = (8, 16, 32, 64), (32, 128, 1_000), (1, 16, 128, 512), (1, 2, 4)


def _head_dim(request: JudgedRequest) -> Iterator[str]:
    arch = request.architecture
    if arch is not None:
        # Where layers have heads of two sizes, the wider ones count.
        widest = max(arch.layer_heads(layer).head_dim for layer in range(arch.layers))
        yield _class_of(widest, HEAD_DIMS, "per head")


def _vocabulary(request: JudgedRequest) -> Iterator[str]:
    yield _class_of(request.case.model.vocab_size, VOCABULARIES, "token ids")


def _prompt(request: JudgedRequest) -> Iterator[str]:
    yield _class_of(len(request.alone.prompt), PROMPTS, "prompt tokens")


def _company(request: JudgedRequest) -> Iterator[str]:
    session = request.case.session
    yield _class_of(1 + len(session.mates if session else ()), REQUESTS, "requests")


AXES = (
    Axis("target", TARGETS, _target, several=True),
    Axis("draft", tuple(DRAFTS), _draft),
    Axis(
        "draft's traits",
        ("reads hidden states", "vocabulary of its own", "quantised draft", "learns from other requests",
         "draft of several layers", "draft of another family", RECURRENT, SEES),
        _draft_traits,
        several=True,
    ),
    Axis(
        "tree",
        (*_classes(NODES, "nodes"), "branches", "chain", "four levels",
         *(f"{kind} tree" for kind in TREE_KINDS if kind != "static")),
        _tree,
        several=True,
    ),
    Axis("sampling", SAMPLINGS, _sampling, several=True),
    Axis("rule", tuple(RULES), _rule),
    Axis("draws", DRAWS, _draws),
    Axis("grammar", tuple(GRAMMARS), _grammar),
    Axis("grammar's beginning", (BEHIND_MARKER, WITH_BUDGET), _grammar_beginning),
    Axis("end", ("eos", "stop token", "stop string", "longest length"), _stops, several=True),
    Axis("layout", tuple(LAYOUTS), _layout),
    Axis("layout's traits", LAYOUT_TRAITS, _layout_traits, several=True),
    Axis("dtype", ("float64", "float32", "bfloat16", "float16"), _dtype),
    Axis("ranks", ("2 ranks", "4 ranks", "requests shared out among ranks"), _ranks),
    Axis("draft's ranks", (ON_ONE, ON_SEVERAL), _draft_ranks),
    Axis("head size", _classes(HEAD_DIMS, "per head"), _head_dim),
    Axis("vocabulary", _classes(VOCABULARIES, "token ids"), _vocabulary),
    Axis("prompt", _classes(PROMPTS, "prompt tokens"), _prompt),
    Axis("company", _classes(REQUESTS, "requests"), _company),
)  # fmt: skip
"""Every axis. No two axes have a value of the same name."""
