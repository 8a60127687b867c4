"""Cases are drawn within an engine's abilities, however narrow; for an engine with all of them, nothing changes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specverify.backends.registry import open_backend
from specverify.campaign.search import ROUND, round_seed
from specverify.properties.strategies import cases
from specverify.properties.strategies.settings import explore
from specverify.reference.abilities import ENDS, LAYOUT_SETTINGS, PROCESSING, TREES, Abilities
from specverify.reference.architecture import Seeded
from specverify.reference.case import DTYPES, Case
from specverify.reference.draft import KINDS as DRAFTS
from specverify.reference.draft.layer_head import ALIGNMENTS, FIRST_TOKENS, LayerHead
from specverify.reference.draft_trees import TREE_KINDS
from specverify.reference.family import FAMILIES
from specverify.reference.layout import COMMITS, KINDS, PAGE_STATES
from specverify.reference.rules import DRAWS, RULES
from specverify.reference.session import ACTIONS

BARE = Abilities(dtypes=("float32",), layout_settings=(), stops=("max_new_tokens",), draws=())
"""The least that an engine can have: greedy decoding of one request, with a draft and a cache of its own."""

WIDER: dict[str, tuple[dict[str, Any], Callable[[Case], Any]]] = {
    "nothing": (
        {},
        lambda case: len(case.prompt) > 126,
    ),
    "sampling by a rule of its own": (
        {"max_temperature": float("inf")},
        lambda case: case.sampling.temperature == 8.0,
    ),
    "sampling alone": (
        {"max_temperature": float("inf"), "greedy": False},
        lambda case: case.sampling.temperature == 8.0,
    ),
    "a low temperature": (
        {"max_temperature": 0.3},
        lambda case: case.sampling.temperature == 0.3,
    ),
    "chains alone": (
        {"max_temperature": 1.0, "rules": ("chain",), "drafts": ("scripted", "model"), "draws": DRAWS},
        lambda case: case.sampling.temperature and case.draft.height > 0,
    ),
    "wide heads": (
        {"head_multiple": 16, "least_window": 0, "drafts": ("model",)},
        lambda case: isinstance(case.model, Seeded) and case.model.architecture.head_dim == 32 and case.draft.model,
    ),
    "one rotary embedding": (
        {"ropes": ("llama3",), "families": ("llama", "mistral")},
        lambda case: isinstance(case.model, Seeded) and case.model.architecture.family == "mistral",
    ),
    "top-k alone": (
        {"max_temperature": 1.0, "processes": ("top_k",)},
        lambda case: case.sampling.top_k > 0,
    ),
    "every processing": (
        {"max_temperature": 1.0, "processes": True},
        lambda case: case.sampling.top_p < 1 and case.sampling.temperature,
    ),
    "end tokens": (
        {"stops": ("max_new_tokens", "eos")},
        lambda case: case.stops.eos,
    ),
    "every end": (
        {"stops": ("max_new_tokens", *ENDS)},
        lambda case: case.stops.stop_strings and case.stops.max_length,
    ),
    "a short context": (
        {"longest": 48, "least_prompt": 3},
        lambda case: len(case.prompt) == 3,
    ),
    "pairs of requests": (
        {"sessions": True, "most_requests": 2, "actions": ("add", "step", "cancel")},
        lambda case: case.session and any(action.kind == "cancel" for action in case.session.actions),
    ),
    "sessions in pages": (
        {"sessions": True, "layouts": ("paged", "prefix"), "layout_settings": LAYOUT_SETTINGS},
        lambda case: case.session and case.layout.overhang,
    ),
    "padded rings": (
        {"layouts": ("sliding",), "layout_settings": ("padded_nodes",)},
        lambda case: case.layout.padded_nodes > 0,
    ),
    "tries": (
        {"drafts": ("ngram",)},
        lambda case: case.draft.TAG == "ngram" and case.draft.height > 1,
    ),
    "two families": (
        {"families": ("qwen2", "pangu")},
        lambda case: isinstance(case.model, Seeded) and case.model.architecture.family == "pangu",
    ),
    "experts without sinks": (
        {"families": ("gpt_oss", "mixtral"), "sinks": False},
        lambda case: isinstance(case.model, Seeded) and case.model.architecture.family == "mixtral",
    ),
    "experts without an indexer": (
        {"families": ("deepseek_v32", "mixtral"), "indexed": False},
        lambda case: isinstance(case.model, Seeded) and case.model.architecture.family == "mixtral",
    ),
    "ordered trees": (
        {"drafts": ("scripted", "model"), "trees": "ordered"},
        lambda case: case.draft.height > 2 and case.draft.shapes[0].branches,
    ),
    "dynamic trees": (
        {"drafts": ("model",), "tree_kinds": TREE_KINDS, "trees": "ordered"},
        lambda case: case.draft.expansion is not None,
    ),
    "heads of one convention": (
        {"drafts": ("eagle1", "eagle3"), "first_tokens": ("own-state",), "alignments": ("last",)},
        lambda case: isinstance(case.draft, LayerHead) and case.draft.alignment == "last" and case.draft.fuses_first,
    ),
    "chains of greedy requests": (
        {"drafts": ("scripted", "ngram"), "trees": "chains"},
        lambda case: case.draft.height > 2,
    ),
    "images that no draft sees": (
        {"images": True, "drafts": ("model", "eagle1")},
        lambda case: case.model.images and any(image.seed for image in case.model.images),
    ),
    "images that drafts see": (
        {"images": True, "draft_images": True, "drafts": ("model", "eagle1")},
        lambda case: case.model.images and case.draft.sees_images,
    ),
    "a family without long prompts": (
        {"families": ("gemma2",), "drafts": ("model",)},
        lambda case: case.draft.TAG == "model",
    ),
}
"""Each: abilities beside the least ones, and a case that they allow and that must be reached."""


def draw_cases(within: Abilities | None, count: int = 48, seed: int = 5) -> list[Case]:
    """Cases drawn within the abilities, in rounds as a search draws them."""
    some: list[Case] = []
    dtypes = ("float32", "float64") if within is None else within.dtypes
    for number in range(count // ROUND):
        explore(round_seed(seed, number), ROUND, cases(dtypes, within=within), lambda case: some.append(case))
    return some


GATED = (
    "ordered trees",
    "dynamic trees",
    "chains of greedy requests",
    "sampling by a rule of its own",
    "chains alone",
    "every end",
    "pairs of requests",
    "padded rings",
    "wide heads",
)
"""The sets that the gate tries; the others are slow."""


@pytest.mark.parametrize(
    "named", [name if name in GATED else pytest.param(name, marks=pytest.mark.slow) for name in WIDER]
)
def test_every_drawn_case_is_one_that_the_engine_takes_and_all_that_it_has_is_reached(named: str) -> None:
    more, is_reached = WIDER[named]
    within = replace(BARE, **more)
    some = draw_cases(within, 48 if named in GATED else 240)
    assert [within.outside(case) for case in some] == [None] * len(some)
    assert any(is_reached(case) for case in some)


def test_where_sampling_alone_is_under_test_no_greedy_case_is_drawn_and_none_is_declined() -> None:
    within = replace(BARE, max_temperature=float("inf"), greedy=False)
    assert not any(case.sampling.greedy for case in draw_cases(within, 24))
    assert within.outside(draw_cases(BARE, 24)[0]) is None


def test_for_our_own_engine_nothing_changes() -> None:
    declaration = replace(open_backend("cpu-eager").declaration, dtypes=("float32", "float64"))
    assert draw_cases(declaration) == draw_cases(None), "it declares everything that cases may hold"


def some_of(words: Any, least: int = 0) -> st.SearchStrategy[tuple[str, ...]]:
    """Some of `words`, at least `least`."""
    return st.lists(st.sampled_from(tuple(words)), unique=True, min_size=least).map(tuple)


ANY = st.builds(
    Abilities,
    dtypes=some_of(DTYPES, 1),
    drafts=some_of(draft for draft in DRAFTS if draft != "toy"),
    commits=some_of(COMMITS).map(lambda some: tuple({"path", *some})),
    layouts=some_of(KINDS, 1),
    layout_settings=some_of(LAYOUT_SETTINGS),
    sessions=st.booleans(),
    actions=some_of(ACTIONS).map(lambda some: tuple({"add", "step", *some})),
    most_requests=st.integers(0, 5),
    takes_tape=st.booleans(),
    max_temperature=st.sampled_from((0.0, 0.2, 1.0, 9.0)),
    rules=some_of(RULES),
    draws=some_of(DRAWS),
    processes=st.one_of(st.booleans(), some_of(PROCESSING)),
    stops=some_of(ENDS).map(lambda some: ("max_new_tokens", *some)),
    trees=st.sampled_from(TREES),
    tree_kinds=st.sampled_from((("static",), TREE_KINDS)),
    first_tokens=some_of(FIRST_TOKENS, 1),
    alignments=some_of(ALIGNMENTS, 1),
    page_states=some_of(PAGE_STATES, 1),
    families=st.one_of(st.none(), some_of(FAMILIES, 1)),
    longest=st.sampled_from((0, 64, 300)),
    least_prompt=st.sampled_from((1, 1, 4)),
)
"""Abilities of any kind."""


@pytest.mark.slow
@given(ANY, st.integers(0, 2**16))
@settings(max_examples=60, suppress_health_check=list(HealthCheck), deadline=None)
def test_whatever_an_engine_declares_its_cases_lie_within(within: Abilities, seed: int) -> None:
    some = draw_cases(within, 12, seed)
    assert some
    assert [within.outside(case) for case in some] == [None] * len(some)
