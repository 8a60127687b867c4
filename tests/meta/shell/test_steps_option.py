"""`--steps N`: N steps of each prompt are judged, picked by the seed, and every report tells what is left out."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specverify.campaign import worker
from specverify.campaign.messages import Opened
from specverify.checkpoints.cases import prepare
from specverify.checkpoints.chosen_steps import step_cases
from specverify.plan import Plan
from specverify.properties.invariants import ALL
from specverify.properties.verdict.finding import Verdict
from specverify.reference.case import Case
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Stops
from specverify.reference.trace import Stage, Trace
from specverify.setup.errors import UnusableInput
from specverify.setup.subjects import open_planted, subject_of
from tests.inprocess import Silent, exit_code_of, in_this_process
from tests.meta.oracle.test_reference_memory import saved_llama


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    saved_llama(folder, 2, 16, 24, 40)
    return folder


def plan_for(checkpoint: Path, **changes: Any) -> Plan:
    plan = Plan(model=str(checkpoint), cases=2, new_tokens=10, steps=3, dtypes=("float32",))
    return replace(plan, **changes)


def chosen_cases(plan: Plan) -> list[Case]:
    prepared = prepare(plan, subject_of(open_planted("cpu-eager", None)), ALL)
    cases = [case for case, _ in prepared.cases(Oracle())]
    assert len(cases) == prepared.total
    return cases


def test_each_prompt_has_so_many_steps_by_the_seed(checkpoint: Path) -> None:
    cases = chosen_cases(plan_for(checkpoint))
    assert len(cases) == 6
    assert all(case.steps == 1 for case in cases)
    lengths = [len(case.prompt) + case.stops.max_new_tokens for case in cases]
    assert lengths == [lengths[0]] * 3 + [lengths[3]] * 3
    assert len({len(case.prompt) for case in cases[:3]}) == 3
    assert [case.draft.TAG for case in cases[:3]] == ["ngram", "scripted", "ngram"]
    assert [case.id for case in chosen_cases(plan_for(checkpoint))] == [case.id for case in cases]
    prompts = [[len(case.prompt) for case in chosen_cases(plan_for(checkpoint, seed=seed))] for seed in (1, 2)]
    assert prompts[0] != prompts[1]


def test_a_text_that_ends_early_has_its_steps_judged_with_further_drafts(checkpoint: Path) -> None:
    base = chosen_cases(plan_for(checkpoint, cases=1))[0].plain_decode()
    turns: list[int] = []

    def short_text(case: Case) -> Trace:
        return Oracle()(replace(case, stops=Stops(1)))

    def draft_at(begun: Case, plain: Trace, turn: int) -> Case:
        turns.append(turn)
        assert (begun.prompt, len(plain.output)) == (base.prompt, 1)
        return begun

    assert len([*step_cases(base, plan_for(checkpoint), 0, short_text, draft_at)]) == 3  # type: ignore[arg-type]
    assert turns == [0, 1, 2]


def test_the_steps_are_judged_and_the_others_left_out(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_this_process(monkeypatch)
    messages: list[Any] = []
    names = ("attention.context-exact", "acceptance.greedy-walk")
    worker.work(plan_for(checkpoint, cases=1, steps=2, invariants=names), messages.append, Silent())  # type: ignore[arg-type]
    (opened,) = [message for message in messages if isinstance(message, Opened)]
    assert opened.excluded == (
        "steps of prompts: --steps 2 judges 2 of each prompt's up to 10, by the seed; the others were not judged",
    )
    verdicts = [message for message in messages if isinstance(message, Verdict)]
    assert [verdict.outcomes for verdict in verdicts] == [dict.fromkeys(names, "checked")] * 2


def test_every_report_says_what_was_left_out(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    in_this_process(monkeypatch)
    monkeypatch.chdir(tmp_path)
    words = ("--cases", "1", "--new-tokens", "10", "--steps", "1", "--dtype", "float32", "--json", "run.json")
    assert exit_code_of("diff", "--model", checkpoint, *words, "--invariant", "attention.context-exact") == 0
    out = " ".join(capfd.readouterr().out.split())
    assert out.startswith("AGREE cpu-eager NOT JUDGED: steps of prompts")
    assert "left out steps of prompts: --steps 1 judges 1 of each prompt's up to 10, by the seed" in out
    assert json.loads((tmp_path / "run.json").read_text())["excluded"][0].startswith("steps of prompts: ")


def test_an_engine_that_shows_tokens_alone_runs_no_step(checkpoint: Path) -> None:
    subject = subject_of(open_planted("cpu-eager", None))
    subject.reveals = frozenset({Stage.EMITTED})
    with pytest.raises(UnusableInput, match="--steps 3: cpu-eager shows tokens alone, and runs no single step"):
        prepare(plan_for(checkpoint), subject, ALL)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((), "--steps needs --model"),
        (("--model", "nowhere", "--batch", "2"), "--steps needs --model, and contradicts --batch and --concurrency"),
        (("--model", "nowhere", "--new-tokens", "3"), "--steps 4 is more than the 3 tokens of a prompt"),
    ],
)
def test_one_line_where_it_cannot_be(words: tuple[str, ...], line: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of("diff", "--steps", "4", *words) == 2
    assert line in capfd.readouterr().err
