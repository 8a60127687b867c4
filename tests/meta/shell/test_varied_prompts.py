"""`--variants K`: variants of the request run on K prompts, and every report says on how many of how many."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specverify.checkpoints.cases import OF_DRAFT, TOKEN_LEVEL, prepare
from specverify.checkpoints.sessions import SESSION_LEVEL
from specverify.plan import Plan
from specverify.properties.invariants import ALL
from specverify.properties.tolerance.closeness import FEWEST_CONTROL_TOKENS
from specverify.properties.verdict.judge import judge
from specverify.reference.case import Case
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Sampling
from specverify.setup.subjects import open_planted, subject_of
from tests.inprocess import exit_code_of, in_this_process
from tests.meta.oracle.test_reference_memory import saved_llama

VARIED = {invariant.name for invariant in ALL if not invariant.looks_at_run} - set(TOKEN_LEVEL)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("llama")
    saved_llama(folder, 1, 16, 24, 40)
    return str(folder)


def asked(checkpoint: str, **changes: Any) -> list[tuple[Case, set[str]]]:
    """The cases of four prompts, of which two are varied, each with the names of the invariants that it is asked."""
    plan = Plan(model=checkpoint, cases=4, new_tokens=4, dtypes=("float64",), variants=2)
    prepared = prepare(replace(plan, **changes), subject_of(open_planted("cpu-eager", None)), ALL)
    assert prepared.num_prompts == 4
    judged_cases = [(case, {invariant.name for invariant in names}) for case, names in prepared.cases(Oracle())]
    assert len(judged_cases) == prepared.total
    return judged_cases


@pytest.mark.parametrize(("changes", "cases"), [({}, 3), ({"draft": "ngram"}, 2), ({"steps": 2}, 2)])
def test_prompts_behind_the_first_are_asked_for_no_variant(
    changes: dict[str, Any], cases: int, checkpoint: str
) -> None:
    judged_cases = asked(checkpoint, **changes)
    prompts = [judged_cases[first : first + cases] for first in range(0, len(judged_cases), cases)]
    varied = [len(set().union(*(names for _, names in prompt)) & VARIED) for prompt in prompts]
    assert min(varied[:2]) > 10
    assert varied[2:] == [0, 0]
    for prompt in prompts:
        assert {"attention.context-exact", "cache.commit-equivalence"} <= set().union(*(names for _, names in prompt))
    if "steps" not in changes:
        padded = [any(case.layout.padded_nodes for case, _ in prompt) for prompt in prompts]
        assert padded == [True, True, False, False]


def test_a_text_is_decoded_plainly_to_its_end_on_varied_prompts_alone(checkpoint: str) -> None:
    subject = subject_of(open_planted("cpu-eager", None))
    plan = Plan(model=checkpoint, cases=3, new_tokens=20, dtypes=("float64",), variants=1, draft="ngram")
    oracle = Oracle()
    lengths = []
    for case, invariants in prepare(plan, subject, ALL).cases(oracle):
        with subject.record_cases() as ran:
            verdict = judge(case, invariants, oracle, subject)
        assert not verdict.findings
        texts = [asked_case.plain_decode() == replace(asked_case, steps=0) for asked_case in ran]
        lengths.append(max(run.stops.max_new_tokens for run, plain in zip(ran, texts, strict=True) if plain))
        if not case.steps:
            # The control of a varied prompt is the beginning of its whole plain decode; others run it for themselves.
            assert subject.remembered(case) is not None
            assert (subject.remembered(case.plain_decode()) is not None) == (lengths == [20])
    assert lengths[2::2] == [FEWEST_CONTROL_TOKENS] * 2
    sampled = replace(plan, sampling=Sampling(temperature=1.0))
    names = [{invariant.name for invariant in of_case} for _, of_case in prepare(sampled, subject, ALL).cases(oracle)]
    assert all(OF_DRAFT in long for long in names[::2])


def test_of_sessions_the_first_are_varied(checkpoint: str) -> None:
    *together, (_, varied), (_, later) = asked(checkpoint, batch=2)
    assert all(set(SESSION_LEVEL) <= names for _, names in together)
    assert len(varied & VARIED) > 10
    assert not later & VARIED


def test_every_report_says_of_how_many_prompts(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    in_this_process(monkeypatch)
    words = ("diff", "--model", checkpoint, "--cases", "3", "--new-tokens", "2", "--dtype", "float64")
    assert (
        exit_code_of(*words, "--variants", "1", "--json", "few.json", "--html", "few.html", "--junit", "few.xml") == 0
    )
    line = "of 1 of 3 prompts; the others were judged by their own runs (--variants)"
    assert line in " ".join(capfd.readouterr().out.split())
    assert line in Path("few.html").read_text()
    assert line in Path("few.xml").read_text()
    assert json.loads(Path("few.json").read_text())["varied_prompts"] == {"varied": 1, "all": 3}
    assert exit_code_of(*words, "--json", "all.json") == 0
    assert "of their own runs" not in capfd.readouterr().out
    assert json.loads(Path("all.json").read_text())["varied_prompts"] == {"varied": 3, "all": 3}
    assert exit_code_of("diff", "--cases", "2", "--variants", "1") == 2
    assert "--variants needs --model" in capfd.readouterr().err


@pytest.mark.parametrize("words", [(), ("--draft", "ngram"), ("--steps", "2")], ids=["own-drafts", "ngram", "steps"])
def test_an_invariant_that_is_named_is_asked_of_every_prompt(
    words: tuple[str, ...], checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    in_this_process(monkeypatch)
    base = ("diff", "--model", checkpoint, "--cases", "5", "--new-tokens", "2", "--dtype", "float64")
    assert exit_code_of(*base, *words, "--invariant", "attention.padding-inert", "--json", "run.json") == 0
    content = json.loads(Path("run.json").read_text())
    assert content["judged"] == content["cases"] == (10 if "--steps" in words else 5)
    assert content["varied_prompts"] == {"varied": 5, "all": 5}


def test_a_named_invariant_and_a_number_of_prompts_contradict(
    checkpoint: str, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("diff", "--model", checkpoint, "--invariant", "attention.*", "--variants", "1")
    assert exit_code_of(*words) == 2
    assert "what is named is asked of every prompt" in capfd.readouterr().err
