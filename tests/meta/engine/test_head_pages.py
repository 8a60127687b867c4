"""Heads over known pages, in each convention: judged clean, hit as far as they should, and red under each fault."""

from dataclasses import replace

import numpy as np
import pytest

from specverify.backends.engine.backend import EngineBackend
from specverify.backends.engine.request import Request
from specverify.backends.faults import fault_named, plant
from specverify.backends.registry import open_backend
from specverify.properties.invariants import ALL
from specverify.properties.verdict.judge import judge
from specverify.reference.abilities import Abilities
from specverify.reference.case import Case
from specverify.reference.case_json import case_from_json, case_to_json
from specverify.reference.draft.eagle1 import Eagle1
from specverify.reference.draft.eagle3 import Eagle3
from specverify.reference.draft.hidden import HeadInput, HiddenStates
from specverify.reference.draft.layer_head import ALIGNMENTS, FIRST_TOKENS, HeadLayer, LayerHead
from specverify.reference.draft.medusa import Medusa
from specverify.reference.draft.mtp import Mtp
from specverify.reference.layout import PAGE_STATES, KvLayout
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.trace import Trace
from specverify.reference.tree import RankTree
from specverify.setup.subjects import subject_of
from tests.models import LLAMA

ORACLE = Oracle()
DRAFTS = tuple(invariant for invariant in ALL if invariant.name.startswith("draft."))
TREE = RankTree((0, 0, 0, 1, 1, 3), (0, 0, 1, 0, 1, 0))
LAYER = HeadLayer(2, 1, 4, 12)
NORMED, FUSED = HiddenStates(place="normed", shift=1), HiddenStates((-1, 0, 1), shift=1)
PROMPT = (3, 1, 4, 1, 5)
PLAIN = Case(LLAMA, PROMPT, stops=Stops(10), dtype="float64")
GREEDY = ORACLE(PLAIN).output
NEAR = Eagle3(TREE, FUSED, LAYER, vocabulary=tuple(sorted({*GREEDY[:4], 16})), seed=1)
"""A head that names few tokens, of which the target takes some: in its first two steps 2 and 1 nodes are accepted."""

HEADS = {"eagle1": Eagle1(TREE, NORMED, LAYER), "eagle3": NEAR, "mtp": Mtp(TREE, NORMED, LAYER, 3)}
PAGE = 2


def with_conventions(head: LayerHead, first_token: str, alignment: str) -> LayerHead:
    """`head` in these conventions; modules that take turns keep no rows of a tree."""
    several = isinstance(head, Mtp) and head.count > 1
    return replace(head, first_token=first_token, alignment=ALIGNMENTS[0] if several else alignment)


def next_turn(head: LayerHead | Medusa, prompt: tuple[int, ...], page_states: str = "carried") -> Case:
    """A request that leaves its pages after two steps, and another one whose `prompt` finds them."""
    actions = tuple(
        Action(kind, (request,))
        for kind, request in (("add", 0), ("step", 0), ("step", 0), ("cancel", 0), ("add", 1), ("step", 1), ("step", 1))
    )
    layout = KvLayout(kind="prefix", page_size=PAGE, page_states=page_states)
    session = Session((Mate(prompt, head, stops=Stops(6)),), actions)
    return replace(PLAIN, draft=head, layout=layout, session=session)


def inputs(trace: Trace, request: int) -> list[HeadInput]:
    """What the head of a request was given, step by step."""
    assert trace.shared is not None
    run = trace.shared.requests[request]
    assert run is not None
    return [step.drafted.given for step in run.steps if step.drafted is not None and step.drafted.given is not None]


def findings(case: Case, fault: str = "") -> list[str]:
    backend = open_backend("cpu-eager")
    if fault:
        plant(backend, fault_named(fault))
    verdict = judge(case, DRAFTS, ORACLE, subject_of(backend))
    assert verdict.unsupported is None, verdict.unsupported
    return [f"{finding.invariant} {finding.where}" for finding in verdict.findings]


LONGER = (*PROMPT, *GREEDY[:3], 2, 7, 9)
"""A prompt that goes on with the text of PROMPT: its first four pages are known when the first request leaves."""


@pytest.mark.parametrize("page_states", PAGE_STATES)
@pytest.mark.parametrize("first_token", FIRST_TOKENS)
@pytest.mark.parametrize("name", HEADS)
def test_a_head_goes_on_behind_known_pages(name: str, first_token: str, page_states: str) -> None:
    case = next_turn(with_conventions(HEADS[name], first_token, "accepted"), LONGER, page_states)
    first = inputs(open_backend("cpu-eager").run(case), 1)[0]
    takes_no_page = name == "mtp" and page_states == "recomputed"
    assert (first.adopted == 0) == takes_no_page
    assert first.first == first.adopted
    assert np.isfinite(first.hidden).all()
    assert findings(case) == []


def test_what_a_hit_adopts_in_each_convention() -> None:
    def num_adopted(first_token: str, page_states: str) -> int:
        case = next_turn(with_conventions(NEAR, first_token, "accepted"), LONGER, page_states)
        return inputs(open_backend("cpu-eager").run(case), 1)[0].adopted

    # The first request leaves 8 rows of its head, or 7 without one for the first token; full pages of them are kept.
    assert (num_adopted("own-state", "carried"), num_adopted("own-state", "recomputed")) == (8, 6)
    # The last of them holds a token of the first request.
    assert (num_adopted("skipped", "carried"), num_adopted("skipped", "recomputed")) == (5, 4)


def test_modules_go_on_behind_known_pages_where_attention_splits_the_prefix() -> None:
    case = next_turn(with_conventions(HEADS["mtp"], "own-state", "accepted"), LONGER)
    backend = open_backend("cpu-split")
    verdict = judge(case, DRAFTS, ORACLE, subject_of(backend))
    assert verdict.unsupported is None, verdict.unsupported
    assert not verdict.findings
    assert inputs(backend.run(case), 1)[0].adopted > 0


def test_heads_without_rows_take_pages_too() -> None:
    case = next_turn(Medusa(TREE, HiddenStates(place="normed"), 3), LONGER)
    assert findings(case) == []
    trace = open_backend("cpu-eager").run(case)
    assert trace.shared is not None
    before, after = trace.shared.accounts[3], trace.shared.accounts[4]
    assert set(after.tables[1]) & set(before.kept)


@pytest.mark.parametrize("first_token", FIRST_TOKENS)
def test_rows_of_accepted_nodes_stay_with_the_alignment_last(first_token: str) -> None:
    head = with_conventions(NEAR, first_token, "last")
    case = replace(PLAIN, draft=head)
    trace = open_backend("cpu-eager").run(case)
    draft_inputs = [step.drafted.given for step in trace.steps if step.drafted is not None]
    true = [step.drafted.given for step in ORACLE(case).steps if step.drafted is not None]
    assert [row_inputs.own_rows for row_inputs in draft_inputs if row_inputs] == [
        row_inputs.own_rows for row_inputs in true if row_inputs
    ]
    assert draft_inputs[-1] is not None
    assert draft_inputs[-1].own_rows
    for step, true_step in zip(trace.steps, ORACLE(case).steps, strict=True):
        assert step.drafted is not None
        assert true_step.drafted is not None
        assert step.drafted.tree == true_step.drafted.tree
        np.testing.assert_allclose(step.drafted.logits, true_step.drafted.logits, rtol=0, atol=1e-9)  # type: ignore[arg-type]
    # The same text without rows of its own has other scores.
    rows = ORACLE(replace(case, draft=with_conventions(NEAR, first_token, "accepted"))).steps[-1].drafted
    last = ORACLE(case).steps[-1].drafted
    assert rows is not None
    assert last is not None
    assert not np.allclose(rows.logits, last.logits, equal_nan=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("first_token", FIRST_TOKENS)
@pytest.mark.parametrize("page_states", PAGE_STATES)
def test_forks_hand_overs_and_evictions_over_two_tiers(page_states: str, first_token: str, alignment: str) -> None:
    head = with_conventions(NEAR, first_token, alignment)
    kinds = (("add", 0), ("step", 0), ("fork", (0, 1)), ("step", (0, 1)), ("hand-over", 0), ("step", 0), ("evict", 0),
             ("restore", 0), ("step", (0, 1)), ("cancel", 1), ("add", 2), ("step", (0, 2)))  # fmt: skip
    actions = tuple(Action(kind, requests if isinstance(requests, tuple) else (requests,)) for kind, requests in kinds)
    layout = KvLayout(kind="prefix", page_size=PAGE, page_states=page_states, first_tier=2, second_tier=64)
    mates = (Mate((7,), head, stops=Stops(6)), Mate(LONGER, head, stops=Stops(6)))
    case = replace(PLAIN, draft=head, layout=layout, session=Session(mates, actions))
    assert findings(case) == []
    trace = open_backend("cpu-eager").run(case)
    assert inputs(trace, 1)[0].adopted > 0, "a fork takes over the rows of its source"
    if alignment == "last":
        assert inputs(trace, 1)[0].own_rows == inputs(trace, 0)[1].own_rows != ()
    assert inputs(trace, 0)[-1].adopted > 0, "a restored request finds its pages in the second tier"


def test_a_handed_over_request_has_the_states_that_no_page_carried() -> None:
    head = with_conventions(NEAR, "skipped", "accepted")
    case = next_turn(head, LONGER, "recomputed")
    assert case.session is not None
    hand_over = (*case.session.actions[:-1], Action("hand-over", (1,)), Action("step", (1,)))
    moved = replace(case, session=replace(case.session, actions=hand_over))
    first, second = inputs(open_backend("cpu-eager").run(moved), 1)
    assert first.adopted > 0
    assert second.first == second.adopted == 0, "all rows are run again"
    assert np.isfinite(second.hidden).all()
    assert findings(moved) == []


PARTED = (*PROMPT[:4], 9, 9, 2)
"""A prompt that parts from PROMPT behind its second page."""

FAULTS = {
    "hit-without-states": next_turn(NEAR, LONGER),
    "states-of-another-prompt": next_turn(NEAR, LONGER),
    "states-one-page-late": next_turn(NEAR, LONGER),
    "known-row-keeps-old-next-token": next_turn(NEAR, PARTED),
    "suffix-fused-as-first-token": next_turn(with_conventions(NEAR, "own-state", "accepted"), LONGER),
    "first-token-fused-without-its-state": next_turn(with_conventions(NEAR, "own-state", "accepted"), LONGER),
    "own-states-kept-for-accepted-nodes": next_turn(NEAR, LONGER),
    "last-token-beside-the-roots-state": next_turn(with_conventions(NEAR, "own-state", "last"), LONGER),
}


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "states-of-another-prompt"])
def test_each_breach_of_the_declared_convention_is_found(fault: str) -> None:
    assert findings(FAULTS[fault]) == []
    assert findings(FAULTS[fault], fault), fault


class KeepsAllTokens(Request):
    """Pages with rows of a head's own are kept for other requests."""

    @property
    def keepable_tokens(self) -> tuple[int, ...]:
        return tuple(self.resolved_tokens)


def test_no_page_with_rows_of_a_heads_own_is_kept() -> None:
    case = next_turn(with_conventions(NEAR, "skipped", "last"), (*PROMPT, *GREEDY[:5], 2))
    backend = open_backend("cpu-eager")
    assert isinstance(backend, EngineBackend)
    assert inputs(backend.run(case), 1)[0].adopted > 0
    assert not judge(case, DRAFTS, ORACLE, subject_of(backend)).findings
    backend.seams = replace(backend.seams, request=KeepsAllTokens)
    assert judge(case, DRAFTS, ORACLE, subject_of(backend)).findings


@pytest.mark.parametrize(
    ("fault", "case"),
    [
        ("own-states-kept-for-accepted-nodes", next_turn(with_conventions(NEAR, "skipped", "last"), LONGER)),
        ("last-token-beside-the-roots-state", next_turn(NEAR, LONGER)),
        ("first-token-fused-without-its-state", next_turn(NEAR, LONGER)),
        ("suffix-fused-as-first-token", next_turn(NEAR, LONGER)),
    ],
)
def test_what_another_convention_asks_for_is_no_fault_there(fault: str, case: Case) -> None:
    assert findings(case, fault) == []


def test_words_are_saved_and_refused() -> None:
    head = with_conventions(NEAR, "own-state", "last")
    case = replace(PLAIN, draft=head)
    assert case_from_json(case_to_json(case)) == case
    assert case_to_json(replace(PLAIN, draft=NEAR))["draft"].keys() == case_to_json(case)["draft"].keys() - {
        "first_token", "alignment",
    }  # fmt: skip
    for wrong in ({"first_token": "fused"}, {"alignment": "none"}, {"own_rows": (1,)}):
        with pytest.raises(Malformed, match=next(iter(wrong))):
            replace(NEAR, **wrong)
    with pytest.raises(Malformed, match="own_rows"):
        replace(head, own_rows=(3, 2))
    with pytest.raises(Malformed, match="alignment"):
        Mtp(TREE, NORMED, LAYER, 2, alignment="last")
    with pytest.raises(Malformed, match="page_states"):
        KvLayout(page_states="recomputed")


def test_an_engine_declares_its_conventions() -> None:
    within = Abilities(dtypes=("float64",), drafts=("eagle3",), layouts=("branch", "prefix"))
    assert within.outside(replace(PLAIN, draft=NEAR)) is None
    assert within.outside(replace(PLAIN, draft=with_conventions(NEAR, "own-state", "accepted"))) is not None
    assert within.outside(replace(PLAIN, draft=with_conventions(NEAR, "skipped", "last"))) is not None
    layout = KvLayout(kind="prefix", page_size=PAGE, page_states="recomputed")
    assert within.outside(replace(PLAIN, draft=NEAR, layout=layout)) is not None
    declaration = open_backend("cpu-eager").declaration
    assert declaration.outside(replace(PLAIN, draft=with_conventions(NEAR, "own-state", "last"), layout=layout)) is None
    assert declaration.outside(replace(PLAIN, draft=replace(NEAR, alignment="last", own_rows=(2,)))) is not None
