"""Drafts behind steps without them, and before a switch: judged where their state is known, and else not checked."""

from dataclasses import replace

import pytest

from specverify.backends.compositions import open_cpu
from specverify.properties.invariants import ALL
from specverify.properties.verdict.finding import Verdict
from specverify.properties.verdict.judge import judge
from specverify.properties.verdict.subject import Subject
from specverify.properties.verdict.taken_steps import taken_steps
from specverify.reference.case import Case
from specverify.reference.draft import Draft, Ngram, Scripted
from specverify.reference.layout import KvLayout
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.session import Action, Session
from specverify.reference.trace import Stage, Trace
from specverify.reference.tree import RankTree, Tree
from specverify.reports import bundle
from specverify.setup.subjects import open_planted, subject_of
from tests.cases import CORPUS
from tests.corruption import ORACLE

HEAD = bundle.load(CORPUS / "states-of-bare-steps-zero.json").case
MODEL = bundle.load(CORPUS / "draft-skips-tokens-of-bare-steps.json").case
NGRAM = Ngram(RankTree((0, 0), (0, 0)), 3)
DRAFT_INVARIANTS = [
    invariant
    for invariant in ALL
    if invariant.name.startswith("draft.") or invariant.name == "cache.commit-equivalence"
]
CLEAN = subject_of(open_cpu())


def with_actions(base: Case, *words: str, draft: Draft = NGRAM) -> Case:
    """`base` as the only request of a session with these actions; a switch is to `draft`."""
    actions = tuple(Action(word, (0,), draft if word == "switch" else None) for word in words)
    session = Session((), actions)
    return replace(base, session=session, layout=KvLayout(), sampling=Sampling(), stops=Stops(8), steps=0)


FAULTS_BEHIND = {
    "a draft model skips a token": ("draft-skips-tokens-of-bare-steps", MODEL, ("step", "first", "step")),
    "a head reads zeros": ("states-of-bare-steps-zero", HEAD, ("first", "step")),
    "a head reads zeros in a later step": ("states-of-bare-steps-zero", HEAD, ("step", "first", "first", "step")),
    "old ids are sent": ("proposal-of-preempted-step-kept", MODEL, ("preempt", "first", "step")),
    "a state is one launch old": (
        "hidden-state-of-launch-before",
        HEAD,
        ("first", "launch", "launch", "resolve", "resolve", "step"),
    ),
}


@pytest.mark.parametrize("way", FAULTS_BEHIND)
def test_a_wrong_draft_behind_a_step_without_it_is_found(way: str) -> None:
    fault, base, words = FAULTS_BEHIND[way]
    case = with_actions(base, "add", *words)
    finding = judge(case, DRAFT_INVARIANTS, ORACLE, subject_of(open_planted("cpu-eager", fault))).first
    assert finding is not None
    assert finding.stage is Stage.DRAFTED
    assert finding.invariant in ("draft.fidelity", "draft.hidden-state-descriptor")
    assert finding.where["request"] == 0
    right = judge(case, DRAFT_INVARIANTS, ORACLE, CLEAN)
    assert not right.findings
    assert right.outcomes["draft.fidelity"] == "checked"
    assert right.compared["draft.fidelity"] > sum(word in ("step", "first", "launch") for word in words)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_zeros_in_place_of_hidden_states_are_found_in_16_bits(dtype: str) -> None:
    case = replace(with_actions(HEAD, "add", "first", "step"), dtype=dtype)
    verdict = judge(case, DRAFT_INVARIANTS, ORACLE, subject_of(open_planted("cpu-eager", "states-of-bare-steps-zero")))
    assert verdict.first is not None
    assert verdict.first.invariant == "draft.hidden-state-descriptor"
    assert not judge(case, DRAFT_INVARIANTS, ORACLE, CLEAN).findings


def test_a_script_goes_on_behind_a_step_without_it() -> None:
    trees = (Tree((0, 0), (HEAD.prompt[-1], 1)), Tree((0, 0, 1), (0, 2, 3)))
    case = with_actions(replace(HEAD, draft=Scripted(trees)), "add", "first", "step", "first", "step")
    verdict = judge(case, DRAFT_INVARIANTS, ORACLE, CLEAN)
    assert not verdict.findings
    assert verdict.outcomes["draft.fidelity"] == "checked"
    assert verdict.trace is not None
    assert [len(step.drafted.tree) for step in verdict.trace.steps if step.drafted] == [1, 2, 1, 3]


def verdict_after(case: Case, change: object) -> Verdict:
    """The verdict on the clean engine's run of `case`, changed."""
    trace = change(CLEAN(case))  # type: ignore[operator]
    return judge(case, DRAFT_INVARIANTS, ORACLE, Subject("changed", lambda _: trace, frozenset(Stage)))


def without_accounts(trace: Trace) -> Trace:
    assert trace.shared is not None
    return replace(trace, shared=replace(trace.shared, accounts=()))


@pytest.mark.parametrize("words", [("first", "step"), ("step", "switch", "step"), ("step", "switch", "first", "step")])
def test_a_draft_of_which_the_trace_tells_too_little_is_not_checked(words: tuple[str, ...]) -> None:
    verdict = verdict_after(with_actions(HEAD, "add", *words), without_accounts)
    outcomes = {name: verdict.outcomes[name] for name in verdict.outcomes if name.startswith("draft.")}
    assert "checked" not in outcomes.values(), outcomes
    assert not verdict.internal


def test_a_step_without_its_draft_that_proposes_a_tree_is_found() -> None:
    case = with_actions(MODEL, "add", "first", "step")

    def grow_tree(trace: Trace) -> Trace:
        assert trace.shared is not None
        (request,) = trace.shared.requests
        assert request is not None
        drafted = request.steps[1].drafted
        assert drafted is not None
        steps = (replace(request.steps[0], drafted=replace(drafted, tree=drafted.tree.with_root(case.prompt[-1]))),)
        return replace(
            trace, shared=replace(trace.shared, requests=(replace(request, steps=(*steps, *request.steps[1:])),))
        )

    draft_findings = [
        finding for finding in verdict_after(case, grow_tree).findings if finding.invariant == "draft.fidelity"
    ]
    assert [(finding.step, finding.where["side"]) for finding in draft_findings] == [(0, "tree")]


@pytest.mark.parametrize("words", [("step", "step", "switch", "step"), ("first", "step", "switch", "first", "step")])
def test_the_draft_before_a_switch_is_judged_by_its_own_invariants(words: tuple[str, ...]) -> None:
    case = with_actions(HEAD, "add", *words)
    right = judge(case, DRAFT_INVARIANTS, ORACLE, CLEAN)
    assert not right.findings
    assert right.outcomes["draft.switched"] == "checked"
    assert right.outcomes["draft.hidden-state-descriptor"] == right.outcomes["draft.fidelity"] == "checked"
    fault = "states-of-bare-steps-zero" if words[0] == "first" else "rotated-states-for-plain-head"
    wrong = judge(case, DRAFT_INVARIANTS, ORACLE, subject_of(open_planted("cpu-eager", fault)))
    assert "draft.hidden-state-descriptor" in {finding.invariant for finding in wrong.findings}


def test_a_request_that_waits_or_ends_takes_no_step_without_its_draft() -> None:
    case = with_actions(
        MODEL, "add", "first", "launch", "launch", "first", "evict", "first", "restore", "step", "preempt"
    )
    trace = CLEAN(case)
    assert trace.shared is not None
    (steps,) = taken_steps(case, trace.shared).values()
    assert [step.kind for step in steps] == ["first", "launch", "launch", "first", "step"][: len(steps)]
    assert len(steps) == len(trace.steps)
