"""Steps and launches in which some requests go without their drafts: judged clean, declared, red under each fault."""

from dataclasses import replace

import pytest

from specverify.backends.registry import open_backend
from specverify.properties.invariants import ALL
from specverify.properties.strategies.swarm import EVERYTHING
from specverify.properties.verdict.coverage.events import EVENTS
from specverify.properties.verdict.coverage.request import JudgedRequest
from specverify.properties.verdict.judge import judge
from specverify.properties.verdict.taken_steps import taken_steps
from specverify.reference.case import Case
from specverify.reference.draft import Draft, LanguageModel, Scripted
from specverify.reference.layout import KvLayout
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.tree import Tree
from specverify.setup.subjects import open_planted, subject_of
from tests.meta.engine.test_head_pages import HEADS, PLAIN, TREE
from tests.models import LLAMA

ORACLE = Oracle()
CLEAN = subject_of(open_backend("cpu-eager"))
JUDGING = tuple(
    invariant for invariant in ALL if invariant.name.split(".")[0] in ("draft", "lossless", "cache", "serving")
)
MODEL = LanguageModel(replace(LLAMA, seed=9), TREE)
DRAFTS: dict[str, Draft] = {"model": MODEL, **HEADS}


def session(draft: Draft, *actions: Action, layout: KvLayout | None = None) -> Case:
    """Three requests with one draft that have entered, and `actions`."""
    mates = (Mate((7, 2), draft, stops=Stops(9)), Mate((3, 1, 4), draft, stops=Stops(9)))
    entries = tuple(Action("add", (number,)) for number in range(3))
    return replace(PLAIN, draft=draft, layout=layout or KvLayout(), session=Session(mates, (*entries, *actions)))


def act(kind: str, *requests: int, bare: tuple[int, ...] = ()) -> Action:
    return Action(kind, requests, bare=bare)


MIXED = (
    act("step", 0, 1, 2, bare=(1,)), act("step", 2, 0, 1, bare=(2, 0)), act("step", 0, 1, 2),
    act("step", 1, 0, bare=(0, 1)), act("step", 0, 1, 2),
)  # fmt: skip
LAUNCHED = (
    act("launch", 0, 1, 2, bare=(1,)), act("launch", 1, 0, bare=(0,)), act("launch", 0, 1, 2), act("resolve", 0),
    act("launch", 2, 1, bare=(2, 1)), act("resolve", 1), act("resolve", 2), act("step", 0, 1, 2),
)  # fmt: skip


@pytest.mark.parametrize("actions", [MIXED, LAUNCHED], ids=["steps", "launches"])
@pytest.mark.parametrize("name", DRAFTS)
def test_requests_without_their_drafts_beside_others(name: str, actions: tuple[Action, ...]) -> None:
    case = session(DRAFTS[name], *actions, layout=KvLayout(kind="paged", page_size=3, draft_page_size=2))
    verdict = judge(case, JUDGING, ORACLE, CLEAN)
    assert verdict.unsupported is None
    assert not verdict.findings
    assert verdict.outcomes["draft.fidelity"] == "checked"
    assert verdict.trace is not None
    assert verdict.trace.shared is not None
    for number, steps in taken_steps(case, verdict.trace.shared).items():
        request = verdict.trace.shared.requests[number]
        assert request is not None
        assert {step.bare for step in steps} == {True, False}
        for step, taken in zip(request.steps, steps, strict=True):
            assert step.drafted is not None
            assert not taken.bare or len(step.drafted.tree) == 1
            assert taken.bare or step.context == () or len(step.drafted.tree) == len(TREE)


def test_what_is_reached_is_counted() -> None:
    case = session(HEADS["eagle3"], act("step", 0, 1, 2), *MIXED, *LAUNCHED)
    trace = CLEAN(case)
    assert trace.shared is not None
    runs = [(number, run) for number, run in enumerate(trace.shared.requests) if run is not None]
    requests = [JudgedRequest(case, number, run, trace.shared) for number, run in runs]
    reached = {event.name for request in requests for event in EVENTS if event.is_reached(request)}
    assert {"step without a draft", "without its draft beside drafted trees", "launched without its draft"} <= reached


FAULTS = {
    "rows-of-bare-steps-unwritten": (MODEL, "draft.fidelity"),
    "state-pool-of-bare-steps-stale": (HEADS["eagle3"], "draft.hidden-state-descriptor"),
    "old-draft-in-bare-step": (MODEL, "draft.fidelity"),
    "states-arranged-by-widest": (HEADS["eagle3"], "draft.hidden-state-descriptor"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_switching_off_is_found(fault: str) -> None:
    draft, name = FAULTS[fault]
    case = session(draft, act("step", 0, 1, 2), act("step", 0, 1, 2, bare=(0,)), act("step", 0, 1, 2))
    verdict = judge(case, JUDGING, ORACLE, subject_of(open_planted("cpu-eager", fault)))
    assert name in {finding.invariant for finding in verdict.findings}
    assert not judge(case, JUDGING, ORACLE, CLEAN).findings


def sampled_session() -> Case:
    """Three requests, of which two sample and take steps without their drafts, the second no others."""
    sampled = Sampling(temperature=1.0, seed=5)
    trees = (Tree((0, 0, 0), (PLAIN.prompt[-1], 1, 2)), Tree((0, 0), (3, 4)))
    mates = (
        Mate((7, 2), Scripted((Tree((0, 0), (2, 5)),)), replace(sampled, seed=6), stops=Stops(9)),
        Mate((3, 1, 4), Scripted(), stops=Stops(9)),
    )
    entries = tuple(Action("add", (number,)) for number in range(3))
    steps = act("first", 0, 1), act("step", 0, 2), act("step", 0, 1, 2, bare=(0, 1)), act("step", 0, 2)
    return replace(PLAIN, draft=Scripted(trees), sampling=sampled, session=Session(mates, (*entries, *steps)))


def test_requests_that_sample_go_without_their_drafts() -> None:
    case = sampled_session()
    judging = tuple(invariant for invariant in ALL if invariant.looks_at_run)
    verdict = judge(case, judging, ORACLE, CLEAN)
    assert not verdict.findings
    assert not verdict.internal
    assert verdict.outcomes["acceptance.sampled-walk"] == "checked"
    planted = open_planted("cpu-eager", "coins-of-absent-nodes-drawn")
    red = judge(case, judging, ORACLE, subject_of(planted))
    assert "acceptance.sampled-walk" in {finding.invariant for finding in red.findings}


def test_words_and_refusals() -> None:
    assert act("step", 1, 0, bare=(0,)).undrafted == {0}
    assert act("first", 1, 0).undrafted == {0, 1}
    assert act("step", 2, 1, 0, bare=(0, 2)).among({2: 1, 1: 0}) == act("step", 1, 0, bare=(1,))
    assert act("step", 2).among({}) is None
    with pytest.raises(Malformed, match="bare: belongs to step and launch, not to preempt"):
        act("preempt", 1, bare=(1,))
    with pytest.raises(Malformed, match="bare: names each request at most once"):
        act("step", 1, bare=(0,))
    case = session(Scripted(), act("step", 0, 1, bare=(1,)))
    able = replace(EVERYTHING, continuous=False)
    assert able.outside(case) is None
    assert replace(able, bare_rows=False).outside(case) == "step in which some drafts are not asked"
