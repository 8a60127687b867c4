"""Pages of drafts of another size than the target's: judged clean, hit apart, counted by an account of their own."""

from dataclasses import replace

import numpy as np
import pytest

from specverify.backends.base import Unsupported
from specverify.backends.compositions import open_engine
from specverify.backends.registry import open_backend
from specverify.properties.invariants import ALL
from specverify.properties.strategies.models import GALLERY
from specverify.properties.verdict.judge import judge
from specverify.reference.abilities import Abilities
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Draft, LanguageModel
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.mtp import Mtp
from specverify.reference.layout import PAGE_STATES, KvLayout
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.trace import Trace
from specverify.reference.tree import RankTree
from specverify.setup.subjects import subject_of
from tests.meta.engine.test_head_pages import HEADS, LAYER, LONGER, PLAIN, TREE
from tests.models import LLAMA

ORACLE = Oracle()
JUDGING = tuple(invariant for invariant in ALL if invariant.name.split(".")[0] in ("cache", "draft", "lossless"))
SMALL = replace(LLAMA, seed=9)
MODEL = LanguageModel(SMALL, TREE)
DRAFTS: dict[str, Draft] = {"model": MODEL, **HEADS}
LAYOUT = KvLayout(kind="prefix", page_size=2, draft_page_size=3, first_tier=2, second_tier=64, poison="nan")


def session(
    draft: Draft, layout: KvLayout, *kinds: tuple[str, tuple[int, ...]], prompt: tuple[int, ...] = LONGER
) -> Case:
    """Three requests with one draft: a turn, its fork, and a later turn with `prompt`."""
    mates = (Mate((7,), draft, stops=Stops(6)), Mate(prompt, draft, stops=Stops(6)))
    actions = tuple(Action(kind, requests) for kind, requests in kinds)
    return replace(PLAIN, draft=draft, layout=layout, session=Session(mates, actions))


ALL_KINDS = (
    ("add", (0,)), ("step", (0,)), ("preempt", (0,)), ("fork", (0, 1)), ("step", (0, 1)), ("hand-over", (0,)),
    ("step", (0,)), ("evict", (0,)), ("restore", (0,)), ("step", (0, 1)), ("cancel", (1,)), ("add", (2,)),
    ("step", (0, 2)), ("step", (2,)),
)  # fmt: skip


def findings(case: Case) -> list[str]:
    verdict = judge(case, JUDGING, ORACLE, subject_of(open_backend("cpu-eager")))
    assert verdict.unsupported is None, verdict.unsupported
    return [f"{finding.invariant} {finding.where}" for finding in verdict.findings]


def tables_of(trace: Trace, action: int, request: int) -> tuple[set[int], set[int]]:
    """The pages of target and draft that a request took from the prefix caches in an action."""
    assert trace.shared is not None
    before, after = trace.shared.accounts[action - 1], trace.shared.accounts[action]
    assert before.draft is not None
    assert after.draft is not None
    own = set(after.draft.tables[request]) & {*before.draft.kept, *after.draft.brought}
    return set(after.tables[request]) & {*before.kept, *after.brought}, own


@pytest.mark.parametrize("page_states", PAGE_STATES)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", DRAFTS)
def test_every_action_of_a_session_on_pages_of_two_sizes(name: str, size: int, page_states: str) -> None:
    layout = replace(LAYOUT, draft_page_size=size, page_states=page_states)
    assert findings(session(DRAFTS[name], layout, *ALL_KINDS)) == []


@pytest.mark.parametrize("name", ["model", "eagle3"])
def test_pages_of_two_sizes_in_a_pool_with_little_room(name: str) -> None:
    layout = KvLayout(kind="prefix", page_size=3, draft_page_size=2, pages=tuple(range(18)), overhang=1)
    assert findings(session(DRAFTS[name], layout, *ALL_KINDS)) == []
    assert findings(session(DRAFTS[name], layout.of_kind("paged"), *ALL_KINDS)) == []


def test_beginnings_of_target_and_draft_are_known_to_unlike_columns() -> None:
    turns = (("add", (0,)), ("step", (0,)), ("step", (0,)), ("cancel", (0,)), ("add", (2,)), ("step", (2,)))
    case = session(MODEL, replace(LAYOUT, first_tier=0, second_tier=0, draft_page_size=4), *turns)
    trace = open_backend("cpu-eager").run(case)
    target_pages, draft_pages = tables_of(trace, 4, 2)
    assert len(target_pages) * 2 != len(draft_pages) * 4 != 0
    # Without pages of the draft's own, what both have committed is taken.
    shared = open_backend("cpu-eager").run(replace(case, layout=replace(case.layout, draft_page_size=0)))
    assert shared.shared is not None
    assert shared.shared.accounts[4].draft is None
    assert findings(case) == []


def test_a_page_of_the_target_serves_requests_with_another_draft() -> None:
    other = LanguageModel(replace(SMALL, seed=3), TREE)
    turns = (("add", (0,)), ("step", (0,)), ("step", (0,)), ("cancel", (0,)), ("add", (1,)), ("step", (1,)))
    for size in (0, 2):
        layout = KvLayout(kind="prefix", page_size=2, draft_page_size=size)
        actions = tuple(Action(kind, requests) for kind, requests in turns)
        case = replace(
            PLAIN, draft=MODEL, layout=layout, session=Session((Mate(LONGER, other, stops=Stops(6)),), actions)
        )
        trace = open_backend("cpu-eager").run(case)
        assert trace.shared is not None
        before, after = trace.shared.accounts[3], trace.shared.accounts[4]
        assert bool(set(after.tables[1]) & set(before.kept)) == (size > 0)
        assert findings(case) == []


def test_a_switch_gives_the_pages_of_the_draft_before_back() -> None:
    other = LanguageModel(replace(SMALL, seed=3), TREE)
    actions = (Action("add", (0,)), Action("step", (0,)), Action("switch", (0,), other), Action("step", (0,)))
    layout = KvLayout(kind="paged", page_size=4, draft_page_size=3)
    case = replace(PLAIN, draft=MODEL, layout=layout, session=Session((), actions))
    trace = open_backend("cpu-eager").run(case)
    assert trace.shared is not None
    before, after = (trace.shared.accounts[number].draft for number in (1, 2))
    assert before is not None
    assert after is not None
    assert before.tables[0]
    assert after.tables[0] == ()
    assert len(after.free) == after.total
    assert findings(case) == []


def test_a_head_whose_later_modules_need_states_begins_anew_without_them() -> None:
    head = Mtp(TREE, HiddenStates(place="normed", shift=1), LAYER, 3)
    turns = (("add", (0,)), ("step", (0,)), ("step", (0,)), ("cancel", (0,)), ("add", (2,)), ("step", (2,)))
    for page_states in PAGE_STATES:
        case = session(head, replace(LAYOUT, page_states=page_states, draft_page_size=1), *turns)
        trace = open_backend("cpu-eager").run(case)
        target_pages, draft_pages = tables_of(trace, 4, 2)
        assert bool(target_pages) == bool(draft_pages) == (page_states == "carried")


def test_what_pages_of_two_sizes_say_of_themselves() -> None:
    layout = KvLayout(kind="prefix", page_size=4, draft_page_size=3, pages=(1, 0), first_tier=1, second_tier=2)
    own = KvLayout(kind="prefix", page_size=3, pages=(2, 1, 0), first_tier=2, second_tier=3)
    assert layout.of_draft == own
    assert own.of_draft == own
    with pytest.raises(Malformed, match="draft_page_size: 129 is not 0 to 128 columns"):
        KvLayout(kind="paged", page_size=4, draft_page_size=129)
    with pytest.raises(Malformed, match="draft_page_size: branch has no pages"):
        KvLayout(draft_page_size=4)
    case = replace(PLAIN, draft=MODEL, layout=KvLayout(kind="paged", page_size=4, draft_page_size=3))
    able = Abilities(dtypes=("float64",), drafts=("model",), layouts=("paged",))
    assert able.outside(case) is None
    assert replace(able, layout_settings=()).outside(case) == "KV layout with draft_page_size"


def test_recurrent_states_are_kept_by_pages_that_both_share() -> None:
    hybrid = Seeded(next(arch for arch in GALLERY if arch.recurrent), 1)
    draft = LanguageModel(hybrid, RankTree((0, 0), (0, 0)))
    case = Case(hybrid, (1, 0, 1), draft, KvLayout(kind="prefix", page_size=2, draft_page_size=3), dtype="float64")
    with pytest.raises(Unsupported, match="a prefix cache with recurrent states, and pages of drafts of another size"):
        open_engine("cpu-eager").run(case)
    paged = replace(case, layout=case.layout.of_kind("paged"))
    plain = open_engine("cpu-eager").run(replace(paged, layout=KvLayout()))
    assert open_engine("cpu-eager").run(paged).output == plain.output
    assert np.isfinite(plain.steps[0].scored.logits).all()  # type: ignore[union-attr]
