"""The Python interface: engines as names and as objects, results with pages and JSON, progress by calls."""

import gc
import inspect
import json
from fractions import Fraction
from pathlib import Path

import pytest

import specverify
from specverify import Progressed, diff, judge, law, replay
from specverify.adapt import blackbox
from specverify.backends.base import Backend
from specverify.campaign.crew_here import CrewHere
from specverify.campaign.messages import Broken
from specverify.conformance import agrees
from specverify.interface.engines import importable_name, named
from specverify.interface.planning import plan_of
from specverify.isolation.here import is_here
from specverify.plan import Plan
from specverify.reference.case import Case
from specverify.reference.sampling import Stops
from specverify.reports import bundle
from specverify.setup.errors import UnusableInput
from tests.mistaken_adapters import prompt_returned, right, token_too_few
from tests.models import LLAMA

CASE = Case(LLAMA, (3, 1, 4), stops=Stops(4))
TEXT = ["lossless.greedy-match", "lossless.stops"]
open_right = blackbox(right)


def test_a_function_is_judged_where_it_stands_and_progress_is_told(tmp_path: Path) -> None:
    reports: list[Progressed] = []
    result = diff(prompt_returned, cases=2, invariants=TEXT, report=tmp_path, progress=reports.append)
    assert (result.agrees, result.outcome, result.exit_code) == (False, "differ", 1)
    (failure,) = result.failures
    assert failure.mistake == "prompt-returned"
    assert reports[-1].failures == 1
    assert {progressed.wanted for progressed in reports} == {2}
    assert "shrinking" in [progressed.activity for progressed in reports]
    assert json.loads(json.dumps(result.to_json()))["findings"][0]["hint"]["mistake"] == "prompt-returned"
    page = result.page()
    assert page.index("must be") < page.index("hint") < page.rindex("DIFFER  prompt_returned")
    assert f"specverify.replay({str(tmp_path / failure.verdict.case.id)!r}"[:-1] in "".join(page.split("\n")).replace(
        " " * 16, ""
    ), "no command can open an object of Python"
    assert result._repr_html_().startswith("<iframe srcdoc=")
    assert failure.file is not None
    again = replay(failure.file, prompt_returned)
    assert (again.word, again.agrees, again.exit_code) == ("FAILED", False, 1)
    assert again.to_json()["finding"]["texts"]["prompt"] == failure.verdict.case.prompt
    assert "FAILED" in again.page()
    mended = replay(failure.file, right)
    assert (mended.word, mended.agrees, mended.failures) == ("FIXED", True, ())
    assert "<iframe" in mended._repr_html_()


def test_a_case_is_judged_by_the_invariants_that_are_named() -> None:
    result = judge(CASE, right, invariants=TEXT)
    assert (result.agrees, result.failures) == (True, ())
    assert set(result.verdict.outcomes) == {*TEXT}
    assert result.page().startswith("AGREE  right")
    wrong = judge(CASE, token_too_few, invariants=TEXT)
    assert (wrong.outcome, wrong.failures[0].mistake) == ("differ", "token-too-few")
    assert "must be" in wrong.page()
    assert wrong.to_json()["failure"]["hint"]["mistake"] == "token-too-few"
    nothing = judge(CASE, right, invariants=["attention.context-exact"])
    assert (nothing.outcome, nothing.agrees) == ("unjudged", False), "what was not compared is no agreement"


def test_what_has_a_name_keeps_it_and_what_has_none_is_offered_while_it_is_used() -> None:
    with named("cpu-eager") as name:
        assert name == "cpu-eager"
    import tests.mistaken_adapters as module

    module.open_named = blackbox(right)  # type: ignore[attr-defined]
    with named(module.open_named) as name:  # type: ignore[attr-defined]
        assert name == "tests.mistaken_adapters:open_named"
    assert importable_name(blackbox(right)) is None
    for engine in (right, blackbox(right)(), lambda: blackbox(right)()):
        with named(engine) as name:
            assert name.startswith("here:")
            assert is_here(name)
        assert not is_here(name)
    with named(right) as first, named(right) as second:
        assert first != second
    with pytest.raises(UnusableInput, match="is no engine"), named(7):  # type: ignore[arg-type]
        pass
    assert isinstance(blackbox(right)(), Backend)


def test_wrong_arguments_are_one_line() -> None:
    for wrong in ({"prompts": "x"}, {"draft": "ngram"}, {"batch": 2}, {"engine": "openai:http://x"}):
        with pytest.raises(UnusableInput) as why:
            diff(**wrong)
        assert "\n" not in str(why.value)
    with pytest.raises(UnusableInput, match="contradict"):
        plan_of(keep_going=True, max_failures=2)


def test_the_law_of_a_rule_is_exact() -> None:
    rule_law = law("multi-round", p=["3/5", "2/5"], q=["1/2", "1/2"])
    assert (rule_law.agrees, rule_law.total_variation, rule_law.failures) == (True, Fraction(0), ())
    lossy = law("typical", p=[0.6, 0.4], q=[0.5, 0.5])
    assert lossy.agrees, "a rule that is lossy as declared breaks no promise"
    assert lossy.total_variation > 0
    assert lossy.to_json()["rules"][0]["rule"] == "typical"
    assert "<iframe" in lossy._repr_html_()
    with pytest.raises(UnusableInput, match="no such rule"):
        law("typcial")
    with pytest.raises(UnusableInput, match="come together"):
        law("typical", p=[0.6, 0.4])


def test_a_test_of_ones_own_begins_with_the_headline_and_saves_the_smallest_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(pytest.fail.Exception) as failed:
        agrees(prompt_returned, cases=2)
    lines = str(failed.value).splitlines()
    assert lines[0].startswith("DIFFER  prompt_returned  lossless.greedy-match: The output leaves")
    assert any("run to shrink it" in line for line in lines)
    (file,) = (tmp_path / ".specverify").glob("????????????.json")
    assert bundle.load(file).invariant == "lossless.greedy-match"
    assert "replay" in str(failed.value)
    assert "--specverify" not in str(failed.value)


def test_every_public_name_is_documented_and_typed() -> None:
    for name in specverify.__all__:
        public = getattr(specverify, name)
        assert inspect.getdoc(public)
    for function in (diff, judge, replay, law):
        signature = inspect.signature(function)
        assert signature.return_annotation is not inspect.Signature.empty
        documented = inspect.getdoc(function) or ""
        for parameter in signature.parameters.values():
            assert parameter.annotation is not inspect.Parameter.empty
            assert f"    {parameter.name}: " in documented, f"{function.__name__} says nothing of {parameter.name}"
    with pytest.raises(AttributeError, match="no attribute 'dif'"):
        specverify.dif  # noqa: B018


@pytest.mark.slow
def test_a_crew_whose_worker_has_ended_takes_orders_all_the_same() -> None:
    """The worker of a short run ends before the campaign tells it to."""
    crew = CrewHere(Plan(backend="absent:open_", cases=1), float("inf"))
    _, broken = next(crew.messages(300.0))
    assert isinstance(broken, Broken)
    assert broken.code == 2
    gc.collect()
    crew.tell("enough")
    crew.end()
