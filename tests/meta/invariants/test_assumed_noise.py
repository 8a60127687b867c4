"""Requests of a session behind the first: their noise has its a-priori size, and no control runs for them."""

from dataclasses import replace

import numpy as np
import pytest

from specverify.properties.invariants import ALL
from specverify.properties.strategies.models import widened
from specverify.properties.tolerance import closeness
from specverify.properties.tolerance.closeness import ASSUMED_POSITIONS, noise
from specverify.properties.verdict.judge import judge
from specverify.properties.verdict.session_members import members, view
from specverify.properties.verdict.subject import Subject
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.trace import Stage, Trace
from specverify.reference.tree import Tree
from specverify.setup.subjects import open_planted, subject_of
from tests.models import LLAMA

PROMPTS = ((1, 2, 3), (4, 5), (6, 7, 8, 9))
ACTIONS = (*(Action("add", (number,)) for number in range(3)), *(Action("step", (0, 1, 2)),) * 3)
MATES = tuple(Mate(prompt, stops=Stops(3)) for prompt in PROMPTS[1:])
CASE = Case(LLAMA, PROMPTS[0], stops=Stops(3), session=Session(MATES, ACTIONS), dtype="float32")
EXACT = tuple(invariant for invariant in ALL if invariant.name == "attention.context-exact")


def counting() -> tuple[Subject, list[Case]]:
    """A right engine, and the cases that it ran."""
    engine, ran = subject_of(open_planted("cpu-eager", None)), list[Case]()

    def run(case: Case) -> Trace:
        ran.append(case)
        return engine(case)

    return Subject("counted", run, engine.reveals), ran


@pytest.mark.parametrize(
    ("dtype", "prompts"), [("float32", PROMPTS[:1]), ("float64", PROMPTS[:1]), ("bfloat16", PROMPTS)]
)
def test_a_control_runs_for_the_first_request_and_in_16_bits_for_each(
    dtype: str, prompts: tuple[tuple[int, ...], ...]
) -> None:
    subject, ran = counting()
    verdict = judge(replace(CASE, dtype=dtype), EXACT, Oracle(), subject)
    assert verdict.agreed
    assert [case.prompt for case in ran if case.session is None] == list(prompts)
    errors = {"float32": 2, "float64": 0, "bfloat16": 6}[dtype]
    assert len(verdict.control_errors) == errors, "logits and attention of each control"


@pytest.mark.parametrize(("dtype", "is_assumed"), [("float32", False), ("float64", True)])
def test_behind_a_long_prompt_a_control_runs_in_float32(dtype: str, is_assumed: bool) -> None:
    case = Case(LLAMA, (1, 2, 3, 4) * (ASSUMED_POSITIONS // 4), stops=Stops(3), dtype=dtype)
    subject, _ = counting()
    subject.assumes_noise = True
    for each, expected in ((case, is_assumed), (replace(case, prompt=case.prompt[: ASSUMED_POSITIONS // 2]), True)):
        subject(each)
        assert noise(each, Oracle(), subject).assumed == expected


@pytest.mark.parametrize(("positions", "agreed"), [(ASSUMED_POSITIONS, True), (2_000, False)])
def test_rounded_angles_of_a_long_prompt_are_no_fault(
    positions: int, agreed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys of a second request behind 1,000 tokens; at the a-priori size of noise they would be a finding."""
    monkeypatch.setattr(closeness, "ASSUMED_POSITIONS", positions)
    architecture = replace(widened(LLAMA.architecture, 32), max_positions=2_000)
    prompt = tuple((7 * place * place + 3 * place) % LLAMA.vocab_size for place in range(1_000))
    actions = (Action("add", (0,)), Action("add", (1,)), Action("step", (0, 1)))
    session = Session((Mate(prompt, stops=Stops(2)),), actions)
    case = Case(Seeded(architecture, 0), (1, 2), stops=Stops(2), session=session, dtype="float32")
    commits = tuple(invariant for invariant in ALL if invariant.name == "cache.commit-equivalence")
    verdict = judge(case, commits, Oracle(), subject_of(open_planted("cpu-eager", None)))
    assert verdict.agreed == agreed
    assert all(finding.where["kind"] == "key" for finding in verdict.findings)


def test_of_a_backend_without_scores_nothing_is_assumed() -> None:
    """Its error is not measured, and rule N assumes the largest that is admissible."""
    trace = subject_of(open_planted("cpu-eager", None))(CASE)
    for shown, is_assumed in ((frozenset(Stage), True), (frozenset({Stage.DRAFTED, Stage.EMITTED}), False)):
        subject = Subject("some", lambda case: trace, shown)
        assumed = [view(subject, member, assumes_noise=True).assumes_noise for member in members(CASE, trace)]
        assert assumed == [is_assumed] * 3
    declared = Subject("declares scores", lambda case: trace, frozenset(Stage))
    for member in members(CASE, trace):
        without_scores = tuple(replace(step, scored=None) for step in member.trace.steps)
        silent = replace(member, trace=replace(member.trace, steps=without_scores))
        assert not view(declared, silent, assumes_noise=True).assumes_noise


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("number", range(3))
def test_a_wrong_row_of_any_request_is_found(number: int, dtype: str) -> None:
    engine = subject_of(open_planted("cpu-eager", None))

    def run(case: Case) -> Trace:
        trace = engine(case)
        if trace.shared is None:
            return trace
        requests = list(trace.shared.requests)
        request = requests[number]
        assert request is not None
        (first, *steps) = request.steps
        assert first.scored is not None
        wrong_logits = first.scored.logits * (1 + 1e-4 * np.arange(first.scored.logits.shape[1]) % 3)
        wrong = replace(first, scored=replace(first.scored, logits=wrong_logits))
        requests[number] = replace(request, steps=(wrong, *steps))
        return replace(trace, shared=replace(trace.shared, requests=tuple(requests)))

    verdict = judge(replace(CASE, dtype=dtype), EXACT, Oracle(), Subject("wrong", run, engine.reveals))
    assert {finding.where.get("request") for finding in verdict.findings} == {number}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_assumed_noise_is_no_larger_than_the_control_admits(dtype: str) -> None:
    """Its limits are those of a control at its a-priori size: the floor of what a control measures."""
    case = Case(LLAMA, PROMPTS[0], Scripted((Tree((0, 0), (3, 5)),)), stops=Stops(6), dtype=dtype)
    subject = subject_of(open_planted("cpu-eager", None))
    measured = noise(case, Oracle(), subject)
    subject.assumes_noise = True
    subject(case)
    assumed = noise(case, Oracle(), subject)
    assert assumed.assumed
    assert not measured.assumed
    assert not assumed.control_at_fault
    assert not list(assumed.control_errors)
    assert 0 < assumed.measured == assumed.logits
    assert assumed.logits <= 1.01 * measured.logits
    assert 0.5 * measured.logits_limit() < assumed.logits_limit() <= 1.01 * measured.logits_limit()
